"""Reports: text tables, JSON, SVG and HTML for people to look at."""
