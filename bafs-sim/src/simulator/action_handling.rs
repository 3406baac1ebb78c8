//! How simulated servers handle the scheduler's actions, and how executions go through their steps.
//! Models where bytes go and how long that takes; decides nothing.

use bafs_proto::ids::{ExecutionId, ExtractionId, ServerId, VolumeId};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::{Error, ErrorCode};
use bafs_sched::{Action, Event, MountedVolume};
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind};

use super::engine::{SimulatedExecution, SimulatedExtract, Simulation, SimulationEvent};
use super::flows::{FillSource, FlowOwner, VolumeFill, is_last_flow};
use super::load::WorkStep;

/// No execution.
const NO_EXECUTION: u32 = u32::MAX;

impl Simulation {
    /// Handles an action of the core. A node that is down does nothing, and answers nothing: the
    /// core will miss it.
    pub(super) fn serve_action(&mut self, action: Action) {
        match action {
            Action::CreateVolume {
                id,
                volume,
                server,
                size,
            } => {
                if self.is_up(server) {
                    self.create_volume(id, volume, server, size.bytes);
                }
            }
            Action::CopyVolume {
                id,
                source,
                server,
                size,
                base_copy: base,
            } => {
                if self.is_up(server) {
                    self.start_copy(id, &source, server, size.bytes, base);
                }
            }
            Action::WarmCache { id, server } => self.warm_cache(id, server),
            Action::InspectCache { id, server } => self.inspect_cache(id, server),
            Action::DeleteVolume { id, server } => {
                if self.is_up(server) {
                    self.delete_volume(id, server);
                    self.pending_events
                        .push_back(Event::VolumeDeleted { volume: id });
                }
            }
            Action::StartJob {
                execution,
                job,
                server,
                volumes,
                ..
            } => {
                if self.is_up(server) {
                    self.start_execution(execution, job, server, volumes);
                }
            }
            Action::KillJob { execution, server } => {
                if self.is_up(server) {
                    self.kill_execution(execution);
                }
            }
            Action::ExtractFile {
                extract,
                index,
                source,
            } => self.start_extract(extract, index, &source),
            Action::ProbeVolumes { server, volumes } => {
                if self.is_up(server) {
                    let there = &self.nodes[self.node_position(server)].volumes;
                    let mut lost = volumes;
                    lost.retain(|id| !there.contains_key(id));
                    self.pending_events
                        .push_back(Event::VolumesProbed { server, lost });
                }
            }
            Action::FindVolumes { server, volumes } => {
                let there = &self.nodes[self.node_position(server)].volumes;
                let mut found = volumes;
                found.retain(|id| self.is_up(server) && there.contains_key(id));
                self.pending_events
                    .push_back(Event::VolumesFound { server, found });
            }
            Action::Finish { .. } => {}
        }
    }

    fn is_up(&self, server: ServerId) -> bool {
        self.nodes[self.node_position(server)].is_up
    }

    /// The link to home of a cluster.
    pub(super) fn home_link(&self, cluster: u32) -> u32 {
        2 * self.nodes.len() as u32 + cluster
    }

    /// The cluster whose link to home this is.
    pub(super) fn cluster_of(&self, link: u32) -> Option<u32> {
        let cluster = link.checked_sub(self.home_link(0))?;
        ((cluster as usize) < self.clusters).then_some(cluster)
    }

    pub(super) fn peers_link(&self, cluster: u32) -> u32 {
        self.home_link(cluster) + self.clusters as u32
    }

    fn create_volume(&mut self, id: VolumeId, volume: VolumeIndex, server: ServerId, bytes: u64) {
        let node = self.node_position(server);
        if self.nodes[node]
            .volumes
            .insert(id, (volume, bytes))
            .is_some()
        {
            self.pending_events
                .push_back(Event::VolumeCreated { volume: id });
            return;
        }
        let cluster = self.nodes[node].cluster;
        match &self.scheduler.workflow().volume(volume).kind {
            VolumeKind::Cache { policy, .. } => {
                let policy = *policy;
                let local = self.local_rate(node);
                let cache = match self.caches.find(cluster, volume) {
                    Some(cache) => cache,
                    None => {
                        let class = self.class_of(node as u32);
                        let seed = self.scenario.seed ^ (u64::from(volume.0) << 16);
                        let imbalance = class
                            .has_hash_imbalance
                            .then_some(seed ^ u64::from(cluster));
                        let latency_us = class.local_latency_us;
                        let fastest = self.links[self.peers_link(cluster) as usize].flow_rate_max();
                        let link = self.add_link(fastest, latency_us);
                        self.caches
                            .find_or_create(cluster, volume, policy, (link, imbalance))
                    }
                };
                let cache = self.caches.get(cache);
                let (link, rate) = (cache.link, cache.add_instance(node as u32, bytes, local));
                self.set_rate(link, rate);
                self.cache_bytes += bytes;
            }
            VolumeKind::Scratch { fill } => {
                self.scratch_bytes += bytes;
                let held = match self.unsized_volumes.contains(&volume) {
                    true => 0,
                    false => bytes,
                };
                let filled = fill
                    .is_some()
                    .then(|| self.scenario.load.fill_bytes(volume, held));
                self.volume_contents
                    .note_created(id, filled.unwrap_or(0), bytes);
                if let Some(filled) = filled {
                    let flows = self.start_home_flows(node as u32, filled, FlowOwner::Fill(id));
                    let from = FillSource::Home;
                    self.fills.insert(
                        id,
                        VolumeFill {
                            source: from,
                            flows,
                        },
                    );
                }
            }
        }
        self.record_sample();
        if !self.fills.contains_key(&id) {
            self.pending_events
                .push_back(Event::VolumeCreated { volume: id });
        }
    }

    fn delete_volume(&mut self, id: VolumeId, server: ServerId) {
        let node = self.node_position(server);
        if let Some((volume, bytes)) = self.nodes[node].volumes.remove(&id) {
            self.forget_volume(node, id, volume, bytes);
            self.record_sample();
        }
    }

    pub(super) fn forget_volume(
        &mut self,
        node: usize,
        id: VolumeId,
        volume: VolumeIndex,
        bytes: u64,
    ) {
        match &self.scheduler.workflow().volume(volume).kind {
            VolumeKind::Cache { .. } => {
                let (cluster, local) = (self.nodes[node].cluster, self.local_rate(node));
                self.pause_warming(self.home_link(cluster));
                if let Some(index) = self.caches.find(cluster, volume) {
                    let cache = self.caches.get(index);
                    let (link, rate) =
                        (cache.link, cache.remove_instance(node as u32, bytes, local));
                    if cache.instance_count() == 0 {
                        self.forget_warming(cluster, index);
                    }
                    self.set_rate(link, rate);
                }
                self.start_warming(cluster);
                self.cache_bytes -= bytes;
            }
            VolumeKind::Scratch { .. } => {
                self.scratch_bytes -= bytes;
                self.volume_contents.forget(id);
            }
        }
        if let Some(fill) = self.fills.remove(&id) {
            self.cut_fill(fill);
        }
    }

    fn start_execution(
        &mut self,
        id: ExecutionId,
        job: JobIndex,
        server: ServerId,
        volumes: Vec<MountedVolume>,
    ) {
        let node = self.node_position(server) as u32;
        let execution = SimulatedExecution {
            id,
            generation: 0,
            job,
            node,
            volumes,
            step: 0,
            pending_count: 0,
            transfer_steps: Vec::new(),
            scan: None,
            pending_flows: [None; 2],
            started_us: self.now,
        };
        let at = match self.free_executions.pop() {
            Some(at) => {
                let generation = self.executions[at as usize].generation + 1;
                self.executions[at as usize] = SimulatedExecution {
                    generation,
                    ..execution
                };
                at
            }
            None => {
                self.executions.push(execution);
                self.executions.len() as u32 - 1
            }
        };
        self.execution_of[job.as_usize()] = at;
        self.nodes[node as usize].executions.push(at);
        self.result.executions += 1;
        self.running_jobs += 1;
        self.record_sample();
        self.pending_events
            .push_back(Event::JobStarted { execution: id });
        self.advance_execution(at);
    }

    /// Starts the next step of an execution and skips steps that take no time.
    pub(super) fn advance_execution(&mut self, at: u32) {
        loop {
            let execution = &mut self.executions[at as usize];
            let (job, step) = (execution.job, execution.step);
            execution.step += 1;
            if let Some((scan, holder)) = execution.scan.take() {
                let node = execution.node;
                self.nodes[node as usize].cache_scan(&scan);
                let cluster = self.nodes[node as usize].cluster;
                if let Some(cache) = self.caches.find(cluster, scan.volume) {
                    self.caches.get(cache).note_read(holder, scan.bytes);
                }
            }
            let seed = self.scenario.seed;
            match self
                .scenario
                .load
                .work_step(self.workflow_jobs(), seed, job, step)
            {
                WorkStep::Read(mount, bytes) => self.read_volume(at, mount, bytes),
                WorkStep::Write(mount, bytes) => {
                    let volume = self.executions[at as usize].volumes[mount].id;
                    self.volume_contents.note_written(volume, bytes);
                    self.transfer_volume_data(at, mount, bytes);
                }
                WorkStep::Compute(compute_us) => self.start_computing(at, compute_us),
                WorkStep::End => return self.end_execution(at),
            }
            if self.executions[at as usize].pending_count > 0 {
                return;
            }
        }
    }

    fn start_computing(&mut self, at: u32, compute_us: u64) {
        let wait = self.scale_compute_us(at, compute_us);
        let execution = &mut self.executions[at as usize];
        if wait > 0 {
            execution.pending_count += 1;
            let due = SimulationEvent::Computed(at, execution.generation);
            self.schedule_event(self.now.saturating_add(wait), due);
        }
    }

    /// How long computing takes where an execution runs.
    fn scale_compute_us(&self, at: u32, compute_us: u64) -> u64 {
        let node = self.executions[at as usize].node;
        let speed = u64::from(self.nodes[node as usize].speed_permille);
        (u128::from(compute_us) * 1000 / u128::from(speed.max(1))) as u64
    }

    /// How long an execution computed, when it is done.
    fn node_compute_us(&self, at: u32) -> u64 {
        let SimulatedExecution { job, .. } = self.executions[at as usize];
        let (workflow, seed) = (self.scheduler.workflow(), self.scenario.seed);
        self.scale_compute_us(at, self.scenario.load.compute_us(workflow, seed, job))
    }

    fn local_rate(&self, node: usize) -> u64 {
        let environment = &self.scenario.environment;
        let class = &environment.nodes[self.nodes[node].class as usize];
        class
            .local_bytes_per_s
            .unwrap_or(environment.local_bytes_per_s)
    }

    /// A flow of a link has ended.
    pub(super) fn handle_flow_end(&mut self, link: u32, owner: FlowOwner) {
        match owner {
            FlowOwner::Execution(at, generation) => {
                let execution = &mut self.executions[at as usize];
                if execution.generation == generation {
                    let mut flows = execution.pending_flows.iter_mut();
                    let ended = flows.find(|flow| flow.is_some_and(|it| it.link == link));
                    ended.and_then(Option::take);
                }
                self.finish_flow(at, generation);
            }
            FlowOwner::Fetch(cache) => self.complete_fetch(cache),
            FlowOwner::Warm(cluster) => self.finish_warming(cluster),
            FlowOwner::Fill(id) => {
                let fill = self.fills.get_mut(&id);
                if fill.is_none_or(|fill| is_last_flow(&mut fill.flows, link)) {
                    self.complete_fill(id);
                }
            }
            FlowOwner::Extract(extract) => {
                let sending = self.extracts.get_mut(&extract);
                if sending.is_some_and(|sending| is_last_flow(&mut sending.flows, link))
                    && let Some(SimulatedExtract { bytes, .. }) = self.extracts.remove(&extract)
                {
                    self.result.elapsed_us = self.now;
                    self.pending_events
                        .push_back(Event::FileExtracted { extract, bytes });
                }
            }
        }
    }

    /// One of the things that an execution waits for is done.
    pub(super) fn finish_flow(&mut self, at: u32, generation: u32) {
        let execution = &mut self.executions[at as usize];
        if execution.generation != generation || execution.pending_count == 0 {
            return;
        }
        execution.pending_count -= 1;
        if execution.pending_count > 0 {
            return;
        }
        self.start_next_transfer(at);
    }

    fn end_execution(&mut self, at: u32) {
        let SimulatedExecution {
            id,
            started_us: started,
            ..
        } = self.executions[at as usize];
        let wall_ms = (self.now - started) / 1_000;
        let computed_ms = self.node_compute_us(at) / 1_000;
        let is_lost = self.has_lost_volume(at);
        let held = self.written_uses(at);
        self.record_span(at, !is_lost);
        self.remove_execution(at);
        let outcome = match is_lost {
            true => {
                JobOutcome::EnvironmentFailed(Error::new(ErrorCode::VolumeLost, "a volume is gone"))
            }
            false => JobOutcome::Exited(0),
        };
        self.pending_events.push_back(Event::JobEnded {
            execution: id,
            report: build_report(outcome, wall_ms, computed_ms, held),
        });
    }

    /// Bytes in the scratch volumes that an execution may write.
    fn written_uses(&self, at: u32) -> Vec<VolumeUse> {
        let SimulatedExecution { job, volumes, .. } = &self.executions[at as usize];
        let workflow = self.scheduler.workflow();
        let mounts = workflow.job(*job).mounts.iter().zip(volumes);
        let written = mounts.filter(|(mount, _)| mount.writable);
        let used = written.map(|(mount, volume)| VolumeUse {
            name: workflow.volume(mount.volume).name.clone(),
            used_bytes: self.volume_contents.held_bytes(volume.id),
            changes: 1,
            ..VolumeUse::default()
        });
        used.collect()
    }

    fn has_lost_volume(&self, at: u32) -> bool {
        let mut volumes = self.executions[at as usize].volumes.iter();
        volumes.any(|mounted| {
            let there = mounted
                .server
                .map(|server| &self.nodes[self.node_position(server)].volumes);
            there.is_some_and(|there| !there.contains_key(&mounted.id))
        })
    }

    /// Takes an execution off its node.
    pub(super) fn remove_execution(&mut self, at: u32) {
        let execution = &mut self.executions[at as usize];
        execution.generation += 1;
        execution.pending_count = 0;
        execution.transfer_steps.clear();
        execution.scan = None;
        let (node, job) = (execution.node, execution.job);
        let flows = std::mem::take(&mut execution.pending_flows);
        self.execution_of[job.as_usize()] = NO_EXECUTION;
        self.nodes[node as usize]
            .executions
            .retain(|other| *other != at);
        self.cut_pending_flows(flows);
        self.running_jobs -= 1;
        self.free_executions.push(at);
        self.record_sample();
    }

    fn kill_execution(&mut self, id: ExecutionId) {
        let Some((job, _)) = self.scheduler.execution(id) else {
            // The execution was lost with its node.
            self.pending_events
                .push_back(Event::JobUnknown { execution: id });
            return;
        };
        let at = self.execution_of[job.as_usize()];
        if at == NO_EXECUTION || self.executions[at as usize].id != id {
            self.pending_events
                .push_back(Event::JobUnknown { execution: id });
            return;
        }
        self.record_span(at, false);
        self.remove_execution(at);
        let report = build_report(JobOutcome::Killed, 0, 0, Vec::new());
        self.pending_events.push_back(Event::JobEnded {
            execution: id,
            report,
        });
    }

    fn start_extract(&mut self, extract: ExtractionId, index: u32, source: &MountedVolume) {
        let workflow = self.scheduler.workflow();
        let volume = workflow.extracts[index as usize].volume;
        // Of a file of unknown size all that its volume may hold is taken.
        let size_bytes = match self.unsized_volumes.contains(&volume) {
            true => 0,
            false => workflow.volume(volume).size_bytes,
        };
        let bytes = self.scenario.load.extract_bytes(index, size_bytes);
        let node = source.server.map(|server| self.node_position(server));
        let Some(node) = node else {
            // With remote I/O the file is at home already.
            self.result.elapsed_us = self.now;
            self.pending_events
                .push_back(Event::FileExtracted { extract, bytes });
            return;
        };
        if !self.nodes[node].is_up || self.extracts.contains_key(&extract) {
            return;
        }
        let node = node as u32;
        let flows = self.start_home_flows(node, bytes, FlowOwner::Extract(extract));
        let sending = SimulatedExtract { node, flows, bytes };
        self.extracts.insert(extract, sending);
    }
}

/// As agents report, but without a volume's name: all waits are added up.
fn build_report(
    outcome: JobOutcome,
    wall_ms: u64,
    cpu_ms: u64,
    mut volumes: Vec<VolumeUse>,
) -> JobReport {
    let waits = VolumeUse {
        wait_ms: wall_ms.saturating_sub(cpu_ms),
        ..VolumeUse::default()
    };
    volumes.push(waits);
    JobReport {
        outcome,
        wall_ms,
        cpu_ms,
        memory_bytes_max: 0,
        output_tail: String::new(),
        volumes,
    }
}
