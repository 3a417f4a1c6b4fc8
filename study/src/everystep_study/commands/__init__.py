"""The commands ``everystep bench`` and ``everystep study``: only their options and what they print."""
