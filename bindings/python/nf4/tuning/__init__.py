"""nf4.tune: measures how long each way of a product takes on the user's GPU, and stores costs that
the library chooses by (docs/design/tuning.md)."""
