"""What happens on one node for one attempt; no Ray in here."""
