"""What a search for the fastest stable configuration runs next."""
