"""How attention is computed: tensors in, tensors out; every piece of metadata is an argument."""
