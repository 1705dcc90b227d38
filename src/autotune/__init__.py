"""One import name for the four folders of the repository, to which the links beside this file point."""
