"""What a long run costs: memory by the attempt, many workers' logs, attempts on real Ray."""
