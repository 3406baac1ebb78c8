//! Figures of a server or of a run for Prometheus: what they are called (docs/METRICS.md), and a
//! port at which they are told. What is told is counted elsewhere.

mod http;
mod openmetrics;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use bafs_sched::logic::Progress;
use bafs_server::counters::{Metrics, ReadMetrics};

/// First part of the names of counters of calls; the rest is the call.
const CALLS_PREFIX: &str = "calls.";

/// A figure that is documented.
#[derive(Debug, Clone, Copy)]
struct DocumentedMetric {
    /// As it is counted.
    name: &'static str,
    /// What it is.
    help: &'static str,
}

const fn documented_metric(name: &'static str, help: &'static str) -> DocumentedMetric {
    DocumentedMetric { name, help }
}

/// Every figure. Names are stable: what is counted may change its name, what is told may not.
const DOCUMENTED_METRICS: &[DocumentedMetric] = &[
    documented_metric("calls", "Calls that were received, by their name"),
    documented_metric("servers", "Servers that the catalog lists"),
    documented_metric(
        "capacity_bytes",
        "Space that a node offers for volumes, in bytes",
    ),
    documented_metric(
        "capacity_files",
        "Space that a node offers for volumes, in files",
    ),
    documented_metric(
        "free_bytes",
        "Space of a node that no volume reserves, in bytes",
    ),
    documented_metric(
        "free_files",
        "Space of a node that no volume reserves, in files",
    ),
    documented_metric("slots", "Jobs that a node runs at once"),
    documented_metric(
        "slot_temporary_bytes",
        "Disk of each slot for temporary files of its job, in bytes",
    ),
    documented_metric(
        "slot_temporary_files",
        "Temporary files that the job of a slot may have",
    ),
    documented_metric(
        "slot_shared_memory_bytes",
        "Memory of each slot for `/dev/shm` of its job, in bytes",
    ),
    documented_metric("jobs_running", "Jobs that a node runs now"),
    documented_metric("jobs_started", "Jobs that a node started"),
    documented_metric("jobs_ended", "Jobs of a node that ended"),
    documented_metric("volumes_created", "Volumes that a node made"),
    documented_metric("volumes_failed", "Volumes that a node could not make"),
    documented_metric(
        "volumes_expired",
        "Volumes that a node deleted as their lifetime was over",
    ),
    documented_metric(
        "fill_files",
        "Files made when scratch volumes were filled or copied",
    ),
    documented_metric(
        "fill_bytes",
        "Bytes of files made when scratch volumes were filled or copied",
    ),
    documented_metric(
        "fill_received_bytes",
        "Bytes that came over the network to fill scratch volumes",
    ),
    documented_metric(
        "fill_digest_failures",
        "Blocks whose digest was wrong when scratch volumes were filled or copied",
    ),
    documented_metric("extract_files", "Files sent home"),
    documented_metric("extract_bytes", "Bytes sent home"),
    documented_metric("file_operations", "File operations that a server ran for agents"),
    documented_metric(
        "file_read_bytes",
        "Bytes that agents read by file operations",
    ),
    documented_metric(
        "file_written_bytes",
        "Bytes that agents wrote by file operations",
    ),
    documented_metric(
        "tree_handoffs",
        "Volumes handed over to agents on the same machine",
    ),
    documented_metric("handoff_connections", "Connections of agents on the same machine"),
    documented_metric(
        "handoff_refusals",
        "Connections of agents on the same machine that were refused",
    ),
    documented_metric("handoff_tickets", "Permissions for agents on the same machine"),
    documented_metric("home_requests", "Calls that a home received"),
    documented_metric("home_read_bytes", "Bytes of files that a home sent"),
    documented_metric("home_written_bytes", "Bytes of files that a home took"),
    documented_metric(
        "home_listed_bytes",
        "Bytes of directory listings that a home sent",
    ),
    documented_metric(
        "cache_served_to_peers_bytes",
        "Bytes that caches of a node gave to peers",
    ),
    documented_metric(
        "cache_home_unique_bytes",
        "Bytes that the node asked home for, as their primary and for the first time",
    ),
    documented_metric(
        "cache_recovered_bytes",
        "Bytes that caches had as their primary when the node started",
    ),
    documented_metric(
        "cache_hits_local",
        "Blocks, or parts of them, that readers found in the node's own cache",
    ),
    documented_metric(
        "cache_hit_local_bytes",
        "Bytes that were in the node's own cache",
    ),
    documented_metric("cache_hits_peer", "Blocks that a peer had"),
    documented_metric("cache_hit_peer_bytes", "Bytes that a peer had"),
    documented_metric("cache_home_reads", "Reads from homes for caches"),
    documented_metric("cache_home_bytes", "Bytes read from homes for caches"),
    documented_metric(
        "cache_read_ahead_bytes",
        "Bytes that caches fetched ahead of readers",
    ),
    documented_metric(
        "cache_read_ahead_used_bytes",
        "Bytes fetched ahead that were read later",
    ),
    documented_metric(
        "cache_warmed_bytes",
        "Bytes that came while caches were warmed",
    ),
    documented_metric(
        "cache_joined_fetches",
        "Reads that waited for a fetch that was under way",
    ),
    documented_metric(
        "cache_digest_failures",
        "Blocks whose digest was wrong: fetched again",
    ),
    documented_metric(
        "cache_fallbacks",
        "Requests that the primary did not answer: another peer or home did",
    ),
    documented_metric(
        "cache_bypassed_blocks",
        "Blocks that were served without being kept",
    ),
    documented_metric(
        "cache_evicted_primary",
        "Blocks dropped for space that were no copies",
    ),
    documented_metric("cache_evicted_secondary", "Copies dropped for space"),
    documented_metric("cache_evicted_pinned", "Pinned blocks dropped for space"),
    documented_metric(
        "cache_evicted_for_full_disk",
        "Blocks given up as the disk was full",
    ),
    documented_metric(
        "cache_wait_us",
        "Time that readers waited for blocks, in microseconds",
    ),
    documented_metric("run_jobs", "Jobs of the workflow"),
    documented_metric("run_jobs_done", "Jobs that are done"),
    documented_metric("run_jobs_running", "Jobs that run now"),
    documented_metric("run_jobs_failed", "Jobs that failed for good"),
    documented_metric("run_jobs_skipped", "Jobs that depend on one that failed"),
    documented_metric("run_files", "Files to send home"),
    documented_metric("run_files_done", "Files that are at home"),
    documented_metric("run_files_failed", "Files that cannot be sent home"),
    documented_metric("run_volumes", "Volumes of the run that exist now"),
    documented_metric("run_nodes", "Nodes that are alive"),
    documented_metric(
        "run_executions",
        "Executions that were started, re-runs included",
    ),
    documented_metric("run_nodes_lost", "Nodes that were lost"),
    documented_metric("run_extracted_bytes", "Bytes of the files that are at home"),
];

/// Help of a figure that is in no document: a defect that a test finds.
const UNDOCUMENTED_HELP: &str = "Not documented";

fn metric_help(name: &str) -> &'static str {
    let found = DOCUMENTED_METRICS.iter().find(|known| known.name == name);
    found.map_or(UNDOCUMENTED_HELP, |known| known.help)
}

/// Tells figures at an address from now on, in a thread of its own, and returns where.
///
/// # Errors
/// When the address cannot be listened at.
pub(crate) fn start_endpoint(address: &str, read: ReadMetrics) -> Result<SocketAddr> {
    let what =
        || format!("--metrics {address}: cannot listen there; it is HOST:PORT of this machine");
    let places: Vec<SocketAddr> = address.to_socket_addrs().with_context(what)?.collect();
    let listener = TcpListener::bind(&*places).with_context(what)?;
    let bound = listener.local_addr()?;
    if !bound.ip().is_loopback() {
        tracing::warn!(%bound, "whoever reaches this address can read the metrics");
    }
    http::serve_page(listener, Arc::new(move || openmetrics::render_page(&read())))?;
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
            "# HELP bafs_volumes_created Volumes that a node made",
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
    fn every_figure_is_documented_once() {
        let document = include_str!("../../../docs/METRICS.md");
        for known in DOCUMENTED_METRICS {
            let name = openmetrics::sanitize_name(known.name);
            let (gauge, counter) = (
                format!("| `bafs_{name}` |"),
                format!("| `bafs_{name}_total` |"),
            );
            let lines = document.lines();
            let found = lines.filter(|l| l.contains(&gauge) || l.contains(&counter));
            assert_eq!(found.count(), 1, "{gauge} in docs/METRICS.md");
            let same = DOCUMENTED_METRICS.iter().filter(|other| other.name == known.name);
            assert_eq!(same.count(), 1, "{}", known.name);
        }
    }

    #[test]
    fn documented_counters_are_exported_from_the_start() {
        use bafs_server::counters::{Counters, HOME_COUNTERS, NODE_COUNTERS};
        let document = include_str!("../../../docs/METRICS.md");
        for (server, names) in [("node", NODE_COUNTERS), ("home", HOME_COUNTERS)] {
            let started = Metrics {
                counters: Counters::with_names(names).snapshot(),
                ..Metrics::default()
            };
            let page = openmetrics::render_page(&started);
            let mut told: Vec<&str> = page
                .lines()
                .filter_map(|line| line.strip_suffix(" 0"))
                .collect();
            let mut documented = Vec::new();
            for line in document.lines() {
                let cells: Vec<&str> = line.split('|').map(str::trim).collect();
                if let ["", name, "counter", servers, ..] = cells[..]
                    && servers.split(", ").any(|name| name == server)
                    // Which calls there will be nobody knows.
                    && name != "`bafs_calls_total`"
                {
                    documented.push(name.trim_matches('`'));
                }
            }
            told.sort_unstable();
            documented.sort_unstable();
            assert_eq!(told, documented, "counters of a {server}");
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
