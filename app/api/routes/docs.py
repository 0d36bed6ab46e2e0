"""`GET /docs`: the API's description as a page."""

from app.api.pages import page_router

router = page_router("docs", "/docs")
