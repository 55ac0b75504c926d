"""A page: parameters that travel together in one flat buffer, split over ranks, and how one of them is read."""
