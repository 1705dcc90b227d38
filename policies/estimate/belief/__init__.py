"""What is believed of the errors of an estimate: before a job has run, and after what its attempts showed."""
