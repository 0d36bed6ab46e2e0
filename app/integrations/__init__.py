"""What the service uses beyond its own process, one package for each provider."""
