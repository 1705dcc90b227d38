"""One run as its history shows it: the state it is in, and its attempts."""
