//! Figures of a server or of a run for Prometheus: what they are called (docs/METRICS.md), and a
//! port at which they are told. What is told is counted elsewhere.

mod http;
mod text;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use bafs_sched::logic::Progress;
use bafs_server::counters::{Metrics, ReadMetrics};

/// First part of the names of counters of calls; the rest is the call.
const CALLS: &str = "calls.";

/// A figure that is documented.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// As it is counted.
    name: &'static str,
    /// What it is.
    help: &'static str,
}

const fn known(name: &'static str, help: &'static str) -> Known {
    Known { name, help }
}

/// Every figure. Names are stable: what is counted may change its name, what is told may not.
const KNOWN: &[Known] = &[
    known("calls", "Calls that were received, by their name"),
    known("servers", "Servers that the catalog lists"),
    known(
        "capacity_bytes",
        "Space that a node offers for volumes, in bytes",
    ),
    known(
        "capacity_files",
        "Space that a node offers for volumes, in files",
    ),
    known(
        "free_bytes",
        "Space of a node that no volume reserves, in bytes",
    ),
    known(
        "free_files",
        "Space of a node that no volume reserves, in files",
    ),
    known("slots", "Jobs that a node runs at once"),
    known(
        "slot_temporary_bytes",
        "Disk of each slot for temporary files of its job, in bytes",
    ),
    known(
        "slot_temporary_files",
        "Temporary files that the job of a slot may have",
    ),
    known(
        "slot_shared_memory_bytes",
        "Memory of each slot for `/dev/shm` of its job, in bytes",
    ),
    known("jobs", "Jobs that a node runs now"),
    known("jobs.started", "Jobs that a node started"),
    known("jobs.ended", "Jobs of a node that ended"),
    known("volumes.made", "Volumes that a node made"),
    known("volumes.failed", "Volumes that a node could not make"),
    known(
        "volumes.expired",
        "Volumes that a node deleted as their lifetime was over",
    ),
    known(
        "fill.files",
        "Files made when scratch volumes were filled or copied",
    ),
    known(
        "fill.bytes",
        "Bytes of files made when scratch volumes were filled or copied",
    ),
    known(
        "fill.received_bytes",
        "Bytes that came over the network to fill scratch volumes",
    ),
    known(
        "fill.damaged",
        "Blocks whose digest was wrong when scratch volumes were filled or copied",
    ),
    known("extract.files", "Files sent home"),
    known("extract.bytes", "Bytes sent home"),
    known("tree_ops", "File operations that a server ran for agents"),
    known(
        "tree_read_bytes",
        "Bytes that agents read by file operations",
    ),
    known(
        "tree_written_bytes",
        "Bytes that agents wrote by file operations",
    ),
    known(
        "trees.handed_over",
        "Volumes handed over to agents on the same machine",
    ),
    known("door.opened", "Connections of agents on the same machine"),
    known(
        "door.refused",
        "Connections of agents on the same machine that were refused",
    ),
    known("door.tickets", "Permissions for agents on the same machine"),
    known("home_requests", "Calls that a home received"),
    known("home_read_bytes", "Bytes of files that a home sent"),
    known("home_written_bytes", "Bytes of files that a home took"),
    known(
        "home_listed_bytes",
        "Bytes of directory listings that a home sent",
    ),
    known(
        "cache_served_bytes",
        "Bytes that caches of a node gave to peers",
    ),
    known(
        "cache_wanted_bytes",
        "Bytes that the node asked home for, as their primary and for the first time",
    ),
    known(
        "cache_kept_bytes",
        "Bytes that caches had as their primary when the node started",
    ),
    known(
        "cache_hits_local",
        "Blocks, or parts of them, that readers found in the node's own cache",
    ),
    known(
        "cache_hit_local_bytes",
        "Bytes that were in the node's own cache",
    ),
    known("cache_hits_peer", "Blocks that a peer had"),
    known("cache_hit_peer_bytes", "Bytes that a peer had"),
    known("cache_home_reads", "Reads from homes for caches"),
    known("cache_home_bytes", "Bytes read from homes for caches"),
    known(
        "cache_ahead_bytes",
        "Bytes that caches fetched ahead of readers",
    ),
    known(
        "cache_ahead_used_bytes",
        "Bytes fetched ahead that were read later",
    ),
    known(
        "cache_warmed_bytes",
        "Bytes that came while caches were warmed",
    ),
    known(
        "cache_joined_flights",
        "Reads that waited for a fetch that was under way",
    ),
    known(
        "cache_digest_failures",
        "Blocks whose digest was wrong: fetched again",
    ),
    known(
        "cache_fallbacks",
        "Requests that the primary did not answer: another peer or home did",
    ),
    known(
        "cache_pass_through",
        "Blocks that were served without being kept",
    ),
    known(
        "cache_evicted_primary",
        "Blocks dropped for space that were no copies",
    ),
    known("cache_evicted_secondary", "Copies dropped for space"),
    known("cache_evicted_pinned", "Pinned blocks dropped for space"),
    known(
        "cache_evicted_for_full_disk",
        "Blocks given up as the disk was full",
    ),
    known(
        "cache_wait_us",
        "Time that readers waited for blocks, in microseconds",
    ),
    known("run_jobs", "Jobs of the workflow"),
    known("run_jobs_done", "Jobs that are done"),
    known("run_jobs_running", "Jobs that run now"),
    known("run_jobs_failed", "Jobs that failed for good"),
    known("run_jobs_skipped", "Jobs that depend on one that failed"),
    known("run_files", "Files to send home"),
    known("run_files_done", "Files that are at home"),
    known("run_files_failed", "Files that cannot be sent home"),
    known("run_volumes", "Volumes of the run that exist now"),
    known("run_nodes", "Nodes that are alive"),
    known(
        "run_executions",
        "Executions that were started, re-runs included",
    ),
    known("run_nodes_lost", "Nodes that were lost"),
    known("run_extracted_bytes", "Bytes of the files that are at home"),
];

/// Help of a figure that is in no document: a defect that a test finds.
const UNKNOWN: &str = "Not documented";

fn help(name: &str) -> &'static str {
    let found = KNOWN.iter().find(|known| known.name == name);
    found.map_or(UNKNOWN, |known| known.help)
}

/// Tells figures at an address from now on, in a thread of its own, and returns where.
///
/// # Errors
/// When the address cannot be listened at.
pub(crate) fn start(address: &str, read: ReadMetrics) -> Result<SocketAddr> {
    let what =
        || format!("--metrics {address}: cannot listen there; it is HOST:PORT of this machine");
    let places: Vec<SocketAddr> = address.to_socket_addrs().with_context(what)?.collect();
    let listener = TcpListener::bind(&*places).with_context(what)?;
    let bound = listener.local_addr()?;
    if !bound.ip().is_loopback() {
        tracing::warn!(%bound, "whoever reaches this address can read the metrics");
    }
    http::serve(listener, Arc::new(move || text::page(&read())))?;
    Ok(bound)
}

/// The progress of a run, as it is told. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shown(Arc<Mutex<Progress>>);

impl Shown {
    /// Takes note of how far the run is.
    pub(crate) fn set(&self, progress: &Progress) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = *progress;
    }

    /// Reads it as figures.
    pub(crate) fn figures(&self) -> ReadMetrics {
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

    fn figures() -> Metrics {
        let counters = [
            ("calls.ReadBlocks", 3),
            ("volumes.made", 2),
            ("no\"such\n", 1),
        ];
        Metrics {
            counters: counters.map(|(name, n)| (name.to_owned(), n)).into(),
            gauges: BTreeMap::from([("free_bytes", 7)]),
        }
    }

    fn ask(address: SocketAddr, request: &str) -> String {
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
        let page = text::page(&figures());
        for line in [
            "# HELP bafs_volumes_made Volumes that a node made",
            "# TYPE bafs_volumes_made counter",
            "bafs_volumes_made_total 2",
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
        for known in KNOWN {
            let name = text::plain(known.name);
            let (gauge, counter) = (
                format!("| `bafs_{name}` |"),
                format!("| `bafs_{name}_total` |"),
            );
            let lines = document.lines();
            let found = lines.filter(|l| l.contains(&gauge) || l.contains(&counter));
            assert_eq!(found.count(), 1, "{gauge} in docs/METRICS.md");
            let same = KNOWN.iter().filter(|other| other.name == known.name);
            assert_eq!(same.count(), 1, "{}", known.name);
        }
    }

    #[test]
    fn what_is_documented_of_a_server_is_told_from_its_start() {
        use bafs_server::counters::{Counters, HOME_COUNTERS, NODE_COUNTERS};
        let document = include_str!("../../../docs/METRICS.md");
        for (server, names) in [("node", NODE_COUNTERS), ("home", HOME_COUNTERS)] {
            let started = Metrics {
                counters: Counters::with_names(names).snapshot(),
                ..Metrics::default()
            };
            let page = text::page(&started);
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
    fn garbage_slow_and_many_clients_keep_nobody_from_the_figures() {
        let address = start("127.0.0.1:0", Arc::new(figures)).expect("it starts");
        let get = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
        assert!(ask(address, get).contains("bafs_volumes_made_total 2"));
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
        assert!(ask(address, "GET /other HTTP/1.1\r\nHost: x\r\n\r\n").contains("404"));
        let put = "PUT /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
        assert!(ask(address, put).contains("405"));
        // More than are served at once, and none of them says anything.
        let idle: Vec<_> = (0..2 * http::CONNECTIONS_MAX)
            .map(|_| TcpStream::connect(address).expect("it listens"))
            .collect();
        let answered = (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            ask(address, get).contains("bafs_volumes_made_total 2")
        });
        assert!(answered, "idle connections keep others out for ever");
        drop(idle);
    }

    #[test]
    fn an_address_that_is_taken_is_an_error() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("an address").to_string();
        let error = start(&address, Arc::new(figures)).expect_err("it is taken");
        assert!(format!("{error:#}").contains(&address));
    }
}
