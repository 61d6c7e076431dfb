"""Results as tables, plots and one self-contained HTML page.

page.py       Page: a small builder of one HTML page (sections, tables, charts); knows nothing of quantization
svg.py, then bars.py, lines.py, dots.py   the charts it draws, as inline SVG with hover titles
files.py      files and folders that appear whole or not at all

summary.py    a Scan as plain dictionaries: the JSON files and the columns of every table
answers.py    the questions that those answer, with outliers.py (the worst tensors) and budget.py (which recipe where)
analysis_page.py   the page of an analysis; sections.py, recipe_sections.py and other_sections.py are what stands on it
folder.py     summary.json, tensors.jsonl and report.html of a folder; `mxrl report`
analyze.py    `mxrl analyze`: open, scan, write; compare.py: what looks at two checkpoints, or at activations
console.py    the columns as tables in the terminal; compare_console.py: those of compare.py

phases.py     long work in phases whose results are kept; phases_console.py: their progress in the terminal
demo.py       demo.json as a page; demo_console.py: its table in the terminal
probe.py      `mxrl probe`: run, keep, write; probe_page.py: the page, with probe_NAME.py for every probe's own part;
              probe_console.py: matrix and claims in the terminal
"""
