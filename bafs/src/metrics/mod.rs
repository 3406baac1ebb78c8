//! Serves the metrics of a server or of a run to Prometheus. Counts nothing itself.

mod http;
mod openmetrics;
mod table;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use bafs_sched::Progress;
use bafs_server::counters::{Metrics, ReadMetrics};

#[cfg(test)]
pub(crate) use table::MetricKind;
pub(crate) use table::TABLE;

/// First part of the names of counters of calls; the rest is the call.
const CALLS_PREFIX: &str = "calls.";

/// Help of a metric that is not in the table: a defect that a test finds.
const UNDOCUMENTED_HELP: &str = "Not documented";

fn metric_help(name: &str) -> &'static str {
    let found = TABLE.iter().find(|metric| metric.name == name);
    found.map_or(UNDOCUMENTED_HELP, |metric| metric.help)
}

/// Tells figures at an address from now on, in a thread of its own, and returns where.
///
/// # Errors
/// When the address cannot be listened at.
pub(crate) fn start_endpoint(address: &str, read: ReadMetrics) -> Result<SocketAddr> {
    let what =
        || format!("--metrics {address}: cannot listen there; give HOST:PORT of this machine");
    let places: Vec<SocketAddr> = address.to_socket_addrs().with_context(what)?.collect();
    let listener = TcpListener::bind(&*places).with_context(what)?;
    let bound = listener.local_addr()?;
    if !bound.ip().is_loopback() {
        tracing::warn!(%bound, "everybody who reaches this address can read the metrics");
    }
    http::serve_page(
        listener,
        Arc::new(move || openmetrics::render_page(&read())),
    )?;
    Ok(bound)
}

/// The progress of a run, as it is told. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct PublishedProgress(Arc<Mutex<Progress>>);

impl PublishedProgress {
    /// Takes note of how far the run is.
    pub(crate) fn publish(&self, progress: &Progress) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = *progress;
    }

    /// Reads it as figures.
    pub(crate) fn read_figures(&self) -> ReadMetrics {
        let shown = self.0.clone();
        Arc::new(move || {
            let progress = *shown.lock().unwrap_or_else(PoisonError::into_inner);
            let counters = [
                ("run_executions", progress.executions),
                ("run_nodes_lost", progress.nodes_lost),
                ("run_extracted_bytes", progress.extracted_bytes),
            ];
            Metrics {
                counters: counters.map(|(name, n)| (name.to_owned(), n)).into(),
                gauges: BTreeMap::from([
                    ("run_jobs", progress.jobs_total),
                    ("run_jobs_done", progress.jobs_done),
                    ("run_jobs_running", progress.jobs_running),
                    ("run_jobs_failed", progress.jobs_failed),
                    ("run_jobs_skipped", progress.jobs_skipped),
                    ("run_files", progress.extracts_total),
                    ("run_files_done", progress.extracts_done),
                    ("run_files_failed", progress.extracts_failed),
                    ("run_volumes", progress.volumes),
                    ("run_nodes", progress.nodes),
                ]),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::time::Duration;

    use super::table::Metric;
    use super::*;

    fn test_figures() -> Metrics {
        let counters = [
            ("calls.ReadBlocks", 3),
            ("volumes_created", 2),
            ("no\"such\n", 1),
        ];
        Metrics {
            counters: counters.map(|(name, n)| (name.to_owned(), n)).into(),
            gauges: BTreeMap::from([("free_bytes", 7)]),
        }
    }

    fn send_request(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).expect("it listens");
        let within = Some(Duration::from_secs(20));
        stream.set_read_timeout(within).expect("a time limit");
        // What it refuses it may refuse before it has read all.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[test]
    fn the_page_has_names_help_and_values() {
        let page = openmetrics::render_page(&test_figures());
        for line in [
            "# HELP bafs_volumes_created Volumes that a node created",
            "# TYPE bafs_volumes_created counter",
            "bafs_volumes_created_total 2",
            "bafs_calls_total{call=\"ReadBlocks\"} 3",
            "bafs_free_bytes 7",
            "bafs_no_such__total 1",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}:\n{page}");
        }
        assert!(page.ends_with("# EOF\n"));
    }

    #[test]
    fn metric_names_are_unique() {
        for metric in TABLE {
            let same = TABLE.iter().filter(|other| other.name == metric.name);
            assert_eq!(same.count(), 1, "{}", metric.name);
        }
    }

    #[test]
    fn documented_counters_are_exported_from_the_start() {
        use bafs_server::counters::{Counters, HOME_COUNTERS, NODE_COUNTERS};
        for (server, names) in [("node", NODE_COUNTERS), ("home", HOME_COUNTERS)] {
            let started = Metrics {
                counters: Counters::with_names(names).snapshot(),
                ..Metrics::default()
            };
            let page = openmetrics::render_page(&started);
            let mut exported: Vec<&str> = page
                .lines()
                .filter_map(|line| line.strip_suffix("_total 0"))
                .collect();
            // The names of calls are known only when calls come.
            let is_served = |metric: &&Metric| {
                let mut servers = metric.served_by.split(", ");
                metric.kind == MetricKind::Counter
                    && metric.name != "calls"
                    && servers.any(|name| name == server)
            };
            let documented = TABLE.iter().filter(is_served);
            let mut documented: Vec<String> = documented
                .map(|metric| format!("bafs_{}", metric.name))
                .collect();
            exported.sort_unstable();
            documented.sort_unstable();
            assert_eq!(exported, documented, "counters of a {server}");
        }
    }

    #[test]
    fn hostile_clients_do_not_block_the_metrics_page() {
        let address = start_endpoint("127.0.0.1:0", Arc::new(test_figures)).expect("it starts");
        let get = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
        assert!(send_request(address, get).contains("bafs_volumes_created_total 2"));
        let huge = format!(
            "GET /metrics HTTP/1.1\r\nx: {}\r\n\r\n",
            "y".repeat(1 << 20)
        );
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(1_000));
        for bad in [
            "\u{0}\u{1}garbage\r\n\r\n",
            "GET",
            &huge,
            &many,
            "POST /metrics HTTP/1.1\r\n",
        ] {
            let mut stream = TcpStream::connect(address).expect("it listens");
            let _ = stream.write_all(bad.as_bytes());
        }
        assert!(send_request(address, "GET /other HTTP/1.1\r\nHost: x\r\n\r\n").contains("404"));
        let put = "PUT /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
        assert!(send_request(address, put).contains("405"));
        // More than are served at once, and none of them says anything.
        let idle: Vec<_> = (0..2 * http::CONNECTIONS_MAX)
            .map(|_| TcpStream::connect(address).expect("it listens"))
            .collect();
        let answered = (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            send_request(address, get).contains("bafs_volumes_created_total 2")
        });
        assert!(answered, "idle connections keep others out for ever");
        drop(idle);
    }

    #[test]
    fn occupied_metrics_address_is_an_error() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("an address").to_string();
        let error = start_endpoint(&address, Arc::new(test_figures)).expect_err("it is taken");
        assert!(format!("{error:#}").contains(&address));
    }
}
