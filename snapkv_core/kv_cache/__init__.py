"""Where KV lives: bookkeeping and storage of kept tokens; it knows no policy and no model."""
