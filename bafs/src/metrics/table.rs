//! The table of metrics: names, kinds, sources and help. `docs/reference/metrics.md` is generated
//! from it. Prometheus conventions: counters end in `_total`, units stand last.

/// What a metric counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetricKind {
    /// It only grows while the process lives.
    Counter,
    /// It is a state of the moment.
    Gauge,
}

/// One metric.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Metric {
    /// Its name where it is counted.
    pub(crate) name: &'static str,
    /// What it counts.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the reference"))]
    pub(crate) kind: MetricKind,
    /// Which processes serve it, separated by commas.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the reference"))]
    pub(crate) served_by: &'static str,
    /// What it is, in words.
    pub(crate) help: &'static str,
}

const fn counter(name: &'static str, served_by: &'static str, help: &'static str) -> Metric {
    Metric {
        name,
        kind: MetricKind::Counter,
        served_by,
        help,
    }
}

const fn gauge(name: &'static str, served_by: &'static str, help: &'static str) -> Metric {
    Metric {
        name,
        kind: MetricKind::Gauge,
        served_by,
        help,
    }
}

/// Every metric. Names are stable from version 0.1 on.
pub(crate) const TABLE: &[Metric] = &[
    counter(
        "calls",
        "catalog, home, node",
        "Calls received, by name of the call",
    ),
    gauge("servers", "catalog", "Servers that the catalog lists"),
    gauge(
        "capacity_bytes",
        "node",
        "Space that a node offers for volumes, in bytes",
    ),
    gauge(
        "capacity_files",
        "node",
        "Space that a node offers for volumes, in files",
    ),
    gauge(
        "free_bytes",
        "node",
        "Space of a node that no volume reserves, in bytes",
    ),
    gauge(
        "free_files",
        "node",
        "Space of a node that no volume reserves, in files",
    ),
    gauge("slots", "node", "Jobs that a node can run at once"),
    gauge(
        "slot_temporary_bytes",
        "node",
        "Disk for the temporary files of the job in each slot, in bytes",
    ),
    gauge(
        "slot_temporary_files",
        "node",
        "Most temporary files of the job in each slot",
    ),
    gauge(
        "slot_shared_memory_bytes",
        "node",
        "Memory for `/dev/shm` of the job in each slot, in bytes",
    ),
    gauge("jobs_running", "node", "Jobs that a node runs now"),
    counter("jobs_started", "node", "Jobs that a node started"),
    counter("jobs_ended", "node", "Jobs of a node that ended"),
    counter("volumes_created", "node", "Volumes that a node created"),
    counter(
        "volumes_failed",
        "node",
        "Volumes that a node could not create",
    ),
    counter(
        "volumes_expired",
        "node",
        "Volumes that a node deleted at the end of their lifetime",
    ),
    counter(
        "fill_files",
        "node",
        "Files created while filling or copying scratch volumes",
    ),
    counter(
        "fill_bytes",
        "node",
        "Bytes of files created while filling or copying scratch volumes",
    ),
    counter(
        "fill_received_bytes",
        "node",
        "Bytes received over the network to fill scratch volumes",
    ),
    counter(
        "fill_digest_failures",
        "node",
        "Blocks with a wrong digest while filling or copying scratch volumes",
    ),
    counter("extract_files", "node", "Files sent to a home"),
    counter("extract_bytes", "node", "Bytes sent to a home"),
    counter(
        "file_operations",
        "home, node",
        "File operations run for agents",
    ),
    counter(
        "file_read_bytes",
        "home, node",
        "Bytes that agents read by file operations",
    ),
    counter(
        "file_written_bytes",
        "home, node",
        "Bytes that agents wrote by file operations",
    ),
    counter(
        "tree_handoffs",
        "node",
        "Volumes handed off to agents on the same machine",
    ),
    counter(
        "handoff_connections",
        "node",
        "Hand-off connections of agents on the same machine",
    ),
    counter(
        "handoff_refusals",
        "node",
        "Hand-off connections that the node rejected",
    ),
    counter("handoff_tickets", "node", "Hand-off tickets issued"),
    counter(
        "mount_searches",
        "node",
        "Searches for processes that still have a volume mounted",
    ),
    counter("home_requests", "home", "Calls that a home server received"),
    counter(
        "home_read_bytes",
        "home",
        "Bytes of files that a home server sent",
    ),
    counter(
        "home_written_bytes",
        "home",
        "Bytes of files that a home server received",
    ),
    counter(
        "home_listed_bytes",
        "home",
        "Bytes of directory listings that a home server sent",
    ),
    counter(
        "home_digest_bytes",
        "home",
        "Bytes of digests that a home server sent, for blocks that nodes get from each other",
    ),
    counter(
        "cache_served_to_peers_bytes",
        "node",
        "Bytes that caches of a node sent to peers",
    ),
    counter(
        "cache_home_unique_bytes",
        "node",
        "Bytes that a node requested from homes as their primary node, for the first time",
    ),
    counter(
        "cache_recovered_bytes",
        "node",
        "Bytes of primary blocks in caches when the node started",
    ),
    counter(
        "cache_hits_local",
        "node",
        "Blocks, or parts of them, that readers found in the cache of the same node",
    ),
    counter(
        "cache_hit_local_bytes",
        "node",
        "Bytes that readers found in the cache of the same node",
    ),
    counter("cache_hits_peer", "node", "Blocks read from a peer"),
    counter("cache_hit_peer_bytes", "node", "Bytes read from a peer"),
    counter("cache_home_reads", "node", "Reads from homes for caches"),
    counter(
        "cache_home_bytes",
        "node",
        "Bytes read from homes for caches",
    ),
    counter(
        "cache_read_ahead_bytes",
        "node",
        "Bytes fetched ahead of readers",
    ),
    counter(
        "cache_read_ahead_used_bytes",
        "node",
        "Bytes fetched ahead that a job read later",
    ),
    counter("cache_warmed_bytes", "node", "Bytes fetched to warm caches"),
    counter(
        "cache_whole_files_opened",
        "node",
        "Whole cached files that the kernel of a job reads itself",
    ),
    counter(
        "cache_whole_files_refused",
        "node",
        "Cached files that could not be given to the kernel whole",
    ),
    counter(
        "cache_whole_files_verified",
        "node",
        "Whole cached files whose blocks were checked",
    ),
    counter(
        "cache_joined_fetches",
        "node",
        "Reads that waited for an in-flight fetch",
    ),
    counter(
        "cache_digest_failures",
        "node",
        "Blocks with a wrong digest, which were fetched again",
    ),
    counter(
        "cache_digest_calls",
        "node",
        "Calls that asked homes for the digests of blocks of other nodes",
    ),
    counter(
        "cache_fallbacks",
        "node",
        "Requests that the primary node did not answer and another peer or a home did",
    ),
    counter(
        "cache_bypassed_blocks",
        "node",
        "Blocks served without being stored",
    ),
    counter(
        "cache_evicted_primary",
        "node",
        "Primary blocks evicted for space",
    ),
    counter(
        "cache_evicted_secondary",
        "node",
        "Secondary copies evicted for space",
    ),
    counter(
        "cache_evicted_for_full_disk",
        "node",
        "Blocks evicted because the disk was full",
    ),
    counter(
        "cache_wait_us",
        "node",
        "Time that readers waited for blocks, in microseconds",
    ),
    gauge("run_jobs", "run", "Jobs of the workflow"),
    gauge("run_jobs_done", "run", "Jobs that are done"),
    gauge("run_jobs_running", "run", "Jobs that run now"),
    gauge("run_jobs_failed", "run", "Jobs that failed for good"),
    gauge(
        "run_jobs_skipped",
        "run",
        "Jobs that depend on a failed job",
    ),
    gauge("run_files", "run", "Files to extract to a home"),
    gauge("run_files_done", "run", "Files that are at home"),
    gauge("run_files_failed", "run", "Files that cannot be extracted"),
    gauge("run_volumes", "run", "Volumes of the run that exist now"),
    gauge("run_nodes", "run", "Nodes that are alive"),
    counter(
        "run_executions",
        "run",
        "Executions started, including repeated ones",
    ),
    counter("run_nodes_lost", "run", "Nodes that were lost"),
    counter(
        "run_extracted_bytes",
        "run",
        "Bytes of the files that are at home",
    ),
];
