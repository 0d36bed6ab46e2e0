"""What the service uses on AWS."""
