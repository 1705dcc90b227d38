"""Every value that passes between the parts of the product: frozen and serialisable."""
