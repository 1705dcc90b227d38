"""What several frameworks share."""
