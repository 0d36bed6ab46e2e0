"""Settings by subject; `app.settings` puts them together and reads them."""
