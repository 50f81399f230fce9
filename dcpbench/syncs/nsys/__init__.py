"""Read what `nsys export` writes, as the tables that the scanner reads from traces of torch.profiler.

Sources: tables, columns and numbers are those of "SQLite Schema Reference" and "SQLite Schema Event Values" in NVIDIA's
Post-Collection Analysis Guide (https://docs.nvidia.com/nsight-systems/AnalysisGuide/index.html, schema 3.16 to 3.24; first
published as https://docs.nvidia.com/nsight-systems/2021.5/nsys-exporter/exported_data.html), which hold for `parquetdir`, too.
NVIDIA does not document the keys of `jsonlines` and how Python frames are stored; both follow public readers of such files.
"""
