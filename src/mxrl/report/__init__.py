"""Results as tables, plots and one self-contained HTML page.

page.py      Page: a small builder of one HTML page (sections, tables, charts); knows nothing of quantization
svg.py       the charts it draws, as inline SVG with hover titles
files.py     files and folders that appear whole or not at all
summary.py   a Scan as plain dictionaries: the JSON files and the columns of every table
console.py   those columns as tables in the terminal
analyze.py   `mxrl analyze`: open, scan, write; and its page
demo.py      demo.json as a page; demo_console.py: its progress and table in the terminal
bars.py, lines.py   the charts that page.py draws with svg.py
"""
