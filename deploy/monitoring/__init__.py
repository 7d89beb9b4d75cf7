"""What Prometheus and Grafana are given: scrape configuration, recording and alert rules, dashboards."""
