//! How simulated executions read caches: from the memory of their node, from disks of their
//! cluster, and from home.
//!
//! Jobs read ahead, so transfers from home and from peers overlap, and memory and disks cost no
//! time. Where a node's memory has a rate, jobs wait for each block instead: a read through several
//! levels takes the sum of their times (the thesis' appendix A.1.4).

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_sched::Event;
use bafs_workflow::{CachePolicy, VolumeKind};

use super::cluster_caches::WaitingReader;
use super::engine::{Simulation, SimulationEvent};
use super::flows::{FlowOwner, TransferStep};
use super::link::SECOND_US;
use super::node::Scan;

impl Simulation {
    pub(super) fn read_volume(&mut self, at: u32, mount: usize, bytes: u64) {
        let execution = &self.executions[at as usize];
        let mounted = execution.volumes[mount];
        let node = execution.node as usize;
        let spec = self.scheduler.workflow().volume(mounted.volume);
        let policy = match spec.kind {
            VolumeKind::Cache { policy, .. } if bytes > 0 => policy,
            _ => return self.transfer_volume_data(at, mount, bytes),
        };
        let Some(server) = mounted.server else {
            return self.transfer_volume_data(at, mount, bytes);
        };
        let cluster = self.nodes[node].cluster;
        let Some(index) = self.caches.find(cluster, mounted.volume) else {
            return self.transfer_volume_data(at, mount, bytes);
        };
        let scan = Scan {
            volume: mounted.volume,
            generation: self.caches.get(index).generation,
            bytes,
            policy,
        };
        let memory_rate = self.memory_rate(node);
        let rest = bytes - self.nodes[node].cached_bytes(&scan);
        let holder = self.node_position(server) as u32;
        self.executions[at as usize].scan = Some((scan, holder));
        let through_memory =
            memory_rate.map(|rate| TransferStep::Memory(memory_time_us(bytes, rate)));
        if rest == 0 {
            if let Some(memory) = through_memory {
                self.start_transfer(at, memory);
            }
            return;
        }
        // Data that warming has fetched so far counts.
        self.pause_warming(self.home_link(cluster));
        let coming = self.fetch_missing(at, index, scan);
        let is_narrow =
            self.caches.get(index).instance_count() < self.computing_nodes[cluster as usize];
        let is_own = holder as usize == node;
        let cache = self.caches.get(index);
        let at_peers = cache.bytes_from_peers(holder, bytes, rest);
        let link = match (is_narrow, is_own) {
            (true, _) => cache.link,
            (false, true) => 2 * node as u32,
            (false, false) => 2 * holder,
        };
        // A partition on another node serves the data that it has from its peers.
        let from_peers = at_peers + if is_own { 0 } else { rest };
        let own_bytes = if is_own { at_peers } else { rest };
        let peers = TransferStep::Peers(link, from_peers, own_bytes);
        if let Some(memory) = through_memory {
            // The last is passed first. Disks of peers are as fast as the own one.
            let from_disk = TransferStep::Disk(rest.saturating_sub(coming));
            let levels = [memory, from_disk, peers].into_iter();
            let levels = levels.filter(|level| !level.is_empty());
            self.executions[at as usize].transfer_steps.extend(levels);
            if coming == 0 {
                self.start_next_transfer(at);
            }
            return;
        }
        match from_peers {
            0 => self.start_transfer(at, TransferStep::Disk(rest)),
            _ => self.start_transfer(at, peers),
        }
    }

    /// Fetches a reader's missing bytes over the link to home, or joins the fetch in progress;
    /// returns the bytes that it waits for.
    fn fetch_missing(&mut self, at: u32, index: u32, scan: Scan) -> u64 {
        let is_led = self.has_leader(at, index, &scan);
        let execution = &mut self.executions[at as usize];
        let (generation, node) = (execution.generation, execution.node);
        let cache = self.caches.get(index);
        let missing = match is_led {
            true => 0,
            false => cache.bytes_to_fetch(scan.bytes, 0),
        };
        if missing > 0 && scan.policy == CachePolicy::Lru {
            cache.leader = Some((at, generation));
        }
        let coming = cache.transfer_bytes();
        if coming > 0 {
            cache.waiting_readers.push(WaitingReader {
                execution: at,
                generation,
                bytes: scan.bytes,
            });
            execution.pending_count += 1;
        }
        self.start_fetch(self.nodes[node as usize].cluster, index, missing);
        coming
    }

    /// Whether another reader that has fetched a cache is still reading it: under LRU its evictions
    /// are always ahead of it, so followers find all data.
    fn has_leader(&mut self, at: u32, index: u32, scan: &Scan) -> bool {
        let Some((leader, generation)) = self.caches.get(index).leader else {
            return false;
        };
        let execution = &self.executions[leader as usize];
        let is_same = |other: &Scan| other.volume == scan.volume && other.bytes >= scan.bytes;
        leader != at
            && execution.generation == generation
            && execution
                .scan
                .as_ref()
                .is_some_and(|(other, _)| is_same(other))
    }

    /// Sets the kept bytes of a node's cache partition: its share by size. Where hashing places
    /// blocks, as servers do within bounds, every other node gets a sixteenth more and the rest get
    /// less.
    pub(super) fn inspect_cache(&mut self, id: VolumeId, server: ServerId) {
        let node = self.node_position(server);
        let cluster = self.nodes[node].cluster;
        let there = self.nodes[node].volumes.get(&id).copied();
        let Some((volume, size)) = there else { return };
        let Some(cache) = self.caches.find(cluster, volume) else {
            return;
        };
        let share = self.caches.get(cache).instance_share(size);
        let kept_bytes = match node.is_multiple_of(2) {
            true => (share + share / 16).min(size),
            false => share - share / 16,
        };
        self.pending_events.push_back(Event::CacheInspected {
            volume: id,
            primary_bytes: kept_bytes,
            refetched_bytes: 0,
        });
    }

    /// Bytes of a cache cross the link to home.
    fn start_fetch(&mut self, cluster: u32, cache: u32, bytes: u64) {
        if bytes > 0 {
            self.result.fetched_bytes += u128::from(bytes);
            self.start_flow(self.home_link(cluster), bytes, FlowOwner::Fetch(cache));
        }
        self.start_warming(cluster);
    }

    /// Bytes of a cache arrived over the link to home. A reader of more bytes waits for the rest.
    pub(super) fn complete_fetch(&mut self, index: u32) {
        let cache = self.caches.get(index);
        let passed = cache.end_transfer();
        let mut done = std::mem::take(&mut cache.waiting_readers);
        let executions = &self.executions;
        done.retain(|waiting| {
            executions[waiting.execution as usize].generation == waiting.generation
        });
        let more = done.extract_if(.., |waiting| waiting.bytes > passed);
        let more: Vec<WaitingReader> = more.collect();
        if let Some(most) = more.iter().map(|waiting| waiting.bytes).max() {
            let node = self.executions[more[0].execution as usize].node;
            let cluster = self.nodes[node as usize].cluster;
            let cache = self.caches.get(index);
            let missing = cache.bytes_to_fetch(most, passed);
            if missing > 0 {
                cache.waiting_readers = more;
            } else {
                done.extend(more);
            }
            self.start_fetch(cluster, index, missing);
        }
        for waiting in done {
            self.finish_flow(waiting.execution, waiting.generation);
        }
    }

    /// Moves an execution to the next level, or to its next step.
    pub(super) fn start_next_transfer(&mut self, at: u32) {
        match self.executions[at as usize].transfer_steps.pop() {
            Some(level) => self.start_transfer(at, level),
            None => self.advance_execution(at),
        }
    }

    fn start_transfer(&mut self, at: u32, level: TransferStep) {
        match level {
            TransferStep::Disk(bytes) => {
                let disk = 2 * self.executions[at as usize].node + 1;
                self.transfer_over(at, disk, bytes);
            }
            TransferStep::Peers(link, bytes, own_bytes) => {
                self.transfer_from_peers(at, link, bytes, own_bytes);
            }
            TransferStep::Memory(wait_us) => {
                let execution = &mut self.executions[at as usize];
                execution.pending_count += 1;
                let due = SimulationEvent::Computed(at, execution.generation);
                self.schedule_event(self.now.saturating_add(wait_us), due);
            }
        }
    }

    fn memory_rate(&self, node: usize) -> Option<u64> {
        let class = self.nodes[node].class as usize;
        self.scenario.environment.nodes[class].memory_bytes_per_s
    }
}

/// How long bytes take through a node's memory, in microseconds.
fn memory_time_us(bytes: u64, bytes_per_s: u64) -> u64 {
    let us = u128::from(bytes) * u128::from(SECOND_US) / u128::from(bytes_per_s);
    u64::try_from(us).unwrap_or(u64::MAX)
}
