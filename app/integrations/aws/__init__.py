"""What the service uses on AWS; nothing here is reached unless a setting names it."""
