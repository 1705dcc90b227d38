"""How many small changes of the policies their tests notice: `make mutation`."""
