//! Caches that are fetched before their readers start: over the link to home of their cluster while
//! it is idle.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};

use super::engine::Simulation;
use super::flows::FlowOwner;

impl Simulation {
    /// A cache partition has to fetch its missing data: the partitions together fetch the whole.
    pub(super) fn warm_cache(&mut self, id: VolumeId, server: ServerId) {
        let node = self.node_position(server);
        let cluster = self.nodes[node].cluster;
        let there = self.nodes[node].volumes.get(&id).map(|(volume, _)| *volume);
        let cache = there.and_then(|volume| Some((volume, self.caches.find(cluster, volume)?)));
        if let Some((volume, cache)) = cache {
            let known = self.warmings.read_bytes_max.get(&volume).copied();
            let most_read = || {
                self.scenario
                    .load
                    .read_bytes_max(self.workflow_jobs(), volume)
            };
            let bytes = known.unwrap_or_else(most_read);
            self.warmings.read_bytes_max.insert(volume, bytes);
            self.warmings.wanted_bytes.insert((cluster, cache), bytes);
            self.start_warming(cluster);
        }
    }

    /// Starts warming over the link to home of a cluster if the link is idle.
    pub(super) fn start_warming(&mut self, cluster: u32) {
        let link = self.home_link(cluster);
        let is_busy = !self.links[link as usize].is_idle();
        // Data in transfer counts on arrival.
        let is_busy = is_busy || self.warmings.active_flows.contains_key(&cluster);
        if self.warmings.wanted_bytes.is_empty() || is_busy {
            return;
        }
        let of_cluster = (cluster, 0)..=(cluster, u32::MAX);
        let wanted = self.warmings.wanted_bytes.range(of_cluster);
        let wanted: Vec<(u32, u64)> = wanted.map(|((_, cache), bytes)| (*cache, *bytes)).collect();
        for (cache, bytes) in wanted {
            let lacking = self.caches.get(cache).missing_bytes(bytes);
            if lacking > 0 {
                let flow = self.start_flow(link, lacking, FlowOwner::Warm(cluster));
                self.warmings
                    .active_flows
                    .insert(cluster, (flow, cache, lacking));
                return;
            }
            self.warmings.wanted_bytes.remove(&(cluster, cache));
        }
    }

    /// A reader uses a link: the data that warming has fetched over it so far stays.
    pub(super) fn pause_warming(&mut self, link: u32) {
        let cluster = self.cluster_of(link);
        let active_flow = cluster.and_then(|cluster| self.warmings.active_flows.remove(&cluster));
        if let Some((flow, cache, bytes)) = active_flow {
            let passed = bytes - self.cut_and_free(link, flow);
            self.add_warmed_bytes(cache, passed);
        }
    }

    /// Warming has fetched data for a cluster.
    pub(super) fn finish_warming(&mut self, cluster: u32) {
        if let Some((_, cache, bytes)) = self.warmings.active_flows.remove(&cluster) {
            self.add_warmed_bytes(cache, bytes);
            self.start_warming(cluster);
        }
    }

    /// A cluster has no part of this cache any more.
    pub(super) fn forget_warming(&mut self, cluster: u32, cache: u32) {
        self.warmings.wanted_bytes.remove(&(cluster, cache));
    }

    /// The run has ended: no more transfers.
    pub(super) fn end_warming(&mut self) {
        let clusters: BTreeSet<u32> = self.warmings.active_flows.keys().copied().collect();
        for cluster in clusters {
            self.pause_warming(self.home_link(cluster));
        }
    }

    fn add_warmed_bytes(&mut self, cache: u32, bytes: u64) {
        self.result.fetched_bytes += u128::from(bytes);
        self.caches.get(cache).add_warmed(bytes);
    }
}
