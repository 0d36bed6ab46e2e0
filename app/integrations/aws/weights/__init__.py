"""Weights in S3: a manifest, parallel downloads that resume, a local cache, uploads."""
