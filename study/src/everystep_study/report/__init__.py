"""What is shown of results. Measures nothing.

| module | what it owns |
|---|---|
| `elements` | what a report is made of: numbers with their source, tables, charts, sections, pages |
| `pages` | what the pages of both commands show |
| `writers` | a page as Markdown, HTML or tables of a terminal |
| `plot` | charts as a picture |
"""
