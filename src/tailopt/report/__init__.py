"""The HTML page about runs, sweeps and studies: one file that needs nothing else.

In reading order:

    page.py           `report_page`: data, script and style -> one file
    contents.py       what the folders hold: runs, sweeps, studies
    run_data.py       a run as the page shows it: curves, clipping, nodes, times
    sweep_data.py     a sweep: its points, and what fewer of them would have found
    study_data.py     a study: its tables
    thinning.py       long series in few points
    assets/           page.html, page.css, and the script: charts.js, sections.js, page.js
"""
