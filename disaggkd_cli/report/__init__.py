"""`disaggkd report`: what runs recorded, as one page to look at."""
