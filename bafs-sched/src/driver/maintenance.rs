//! What a run does beside its steps: it keeps its volumes alive, follows nodes to their addresses,
//! hears its user, and shares nodes with other runs. Decides nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::ids::{ExtractionId, ServerId, VolumeId};
use bafs_proto::node_quota::NodeQuotaList;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::message::{DriverMessage, send_event};
use super::{CATALOG_POLL_INTERVAL_MS, Driver, monotonic_now, wall_time_now};
use crate::io::home_aliases::HomeAliases;
use crate::io::node_quotas::ClockReading;
use crate::io::servers::RETRY_PAUSE;
use crate::io::user_commands;
use crate::{Event, MountedVolume};

/// How long the end of a run waits for nodes that do not answer, in milliseconds.
const QUOTA_RELEASE_TIMEOUT_MS: u64 = 1_000;

impl Driver {
    /// Compares the homes of the workflow, until all of them are known. Who waits for what is
    /// answered waits for the first comparison.
    pub(super) fn spawn_alias_check(&mut self) -> oneshot::Receiver<()> {
        let (servers, notes) = (self.servers.clone(), self.messages.clone());
        let (compared, first_comparison) = oneshot::channel();
        let mut compared = Some(compared);
        self.tasks.spawn(async move {
            let mut aliases = HomeAliases::default();
            loop {
                if !servers.can_compare_homes() {
                    tokio::time::sleep(RETRY_PAUSE).await;
                    continue;
                }
                match servers.check_home_aliases(&mut aliases).await {
                    Ok(is_complete) if is_complete => return,
                    Ok(_) => drop(compared.take()),
                    Err(error) => {
                        // The loop ended: nobody waits for this any more.
                        let _ = notes.send(DriverMessage::RunRejected(error)).await;
                        return;
                    }
                }
                tokio::time::sleep(Duration::from_millis(CATALOG_POLL_INTERVAL_MS)).await;
            }
        });
        first_comparison
    }

    /// What users wished since the last time.
    pub(super) fn read_commands(&mut self) -> Vec<Event> {
        let from = self.commands_read.max(self.scheduler.commands_received());
        let (run, workflow) = (self.scheduler.run(), self.scheduler.workflow());
        let (commands, lines) =
            user_commands::read_commands(&self.command_journal, run, workflow, from);
        self.commands_read = from + lines;
        commands
            .into_iter()
            .map(|(count, stop_request)| {
                if stop_request.is_none() {
                    tracing::warn!(count, "an unknown command is ignored");
                }
                Event::CommandReceived {
                    count,
                    command: stop_request,
                }
            })
            .collect()
    }

    /// Asks nodes to keep a part for this run, and gives back what others are to have: the core
    /// uses it no more before a node is told.
    pub(super) async fn request_quotas(&mut self) -> Result<()> {
        let Some(shares) = &mut self.node_quotas else {
            return Ok(());
        };
        let moment = ClockReading {
            wall_time: wall_time_now(),
            monotonic_time: monotonic_now(),
        };
        let (smaller, calls) = shares.take_due_requests(moment, &self.scheduler);
        if !smaller.is_empty() {
            let event = Event::QuotasChanged { quotas: smaller };
            self.apply_events(vec![event]).await?;
        }
        for (server, call) in calls {
            let (servers, notes) = (self.servers.clone(), self.messages.clone());
            let place = self.server_address(server);
            self.tasks.spawn(async move {
                let answer = servers.set_node_quota(&place.address, call).await;
                // The loop ended: nobody waits for this any more.
                let _ = notes
                    .send(DriverMessage::QuotaAnswered(server, answer))
                    .await;
            });
        }
        Ok(())
    }

    /// Takes what a node keeps for this run, or why it keeps nothing.
    pub(super) fn handle_quota_answer(
        &mut self,
        server: ServerId,
        answer: Result<NodeQuotaList>,
    ) -> Option<Event> {
        let shares = self.node_quotas.as_mut()?;
        let shares = match answer {
            Ok(answer) => shares.handle_grant(server, answer),
            Err(error) => {
                let (is_news, told) = shares.handle_refusal(server, &error);
                let is_hopeless = shares.is_hopeless();
                let node = self.scheduler.node(server).map(|node| node.name.clone());
                let node = node.unwrap_or_else(|| server.to_string());
                if is_news {
                    tracing::warn!(node, %error, "the node has no quota for this run");
                } else {
                    tracing::debug!(node, %error, "the node has no quota yet");
                }
                if is_hopeless {
                    let doing = format_args!("node {node} has no quota for this run");
                    self.quota_refusal = Some(error.context(doing));
                }
                told
            }
        };
        (!shares.is_empty()).then_some(Event::QuotasChanged { quotas: shares })
    }

    /// Gives back what nodes keep for this run; those that do not hear it forget it soon, and
    /// nobody waits long for them.
    pub(super) async fn release_quotas(&mut self) {
        let calls = self
            .node_quotas
            .as_ref()
            .map(|shares| shares.release_requests(wall_time_now()));
        let mut tasks = JoinSet::new();
        for (server, call) in calls.unwrap_or_default() {
            if self.scheduler.is_lost(server) {
                continue;
            }
            let (servers, place) = (self.servers.clone(), self.server_address(server));
            tasks.spawn(async move {
                if let Err(error) = servers.set_node_quota(&place.address, call).await {
                    tracing::debug!(node = place.address, %error, "the node's quota for this run \
                        expires soon");
                }
            });
        }
        let told = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_millis(QUOTA_RELEASE_TIMEOUT_MS), told).await;
    }

    /// A node that came back may listen elsewhere.
    pub(super) fn update_addresses(&mut self) {
        for (server, watched) in &self.watch_lists {
            let Some(node) = self.scheduler.node(*server) else {
                continue;
            };
            watched.send_if_modified(|watched| {
                let has_moved = watched.address != node.address;
                if has_moved {
                    watched.address.clone_from(&node.address);
                }
                has_moved
            });
        }
    }

    /// Keeps volumes alive, well before their servers would delete them. Those with results live
    /// longer, should nobody be there any more to ask.
    pub(super) fn renew_volumes(&mut self) {
        let results = self.scheduler.result_volumes();
        for (server, volumes) in self.scheduler.ready_volumes() {
            let (with, without): (Vec<_>, Vec<_>) =
                volumes.into_iter().partition(|id| results.contains(id));
            self.renew_volumes_on(server, with, self.servers.settings.result_lifetime_ms);
            self.renew_volumes_on(server, without, 0);
        }
    }

    /// Asks for volumes of a server, and tells the core which are gone.
    pub(super) fn renew_volumes_on(
        &mut self,
        server: ServerId,
        volumes: Vec<VolumeId>,
        lifetime_ms: u64,
    ) {
        if volumes.is_empty() {
            return;
        }
        let (servers, notes, place) = (
            self.servers.clone(),
            self.messages.clone(),
            self.server_address(server),
        );
        self.tasks.spawn(async move {
            match servers.renew_volumes(&place, volumes, lifetime_ms).await {
                // That everything is well is not worth a record.
                Ok(lost) if lost.is_empty() => {}
                Ok(lost) => send_event(&notes, Some(Event::VolumesProbed { server, lost })).await,
                Err(error) => tracing::debug!(node = place.address, %error, "volumes not renewed"),
            }
        });
    }

    /// Asks a node that is back which of these volumes it has, until it says so or is given up.
    pub(super) fn find_volumes(&mut self, server: ServerId, volumes: Vec<VolumeId>) {
        let (servers, notes, place) = (
            self.servers.clone(),
            self.messages.clone(),
            self.server_address(server),
        );
        let search = self.tasks.spawn(async move {
            let found = servers.find_volumes(&place, volumes).await;
            send_event(&notes, Some(Event::VolumesFound { server, found })).await;
        });
        if let Some(earlier) = self.volume_searches.insert(server, search) {
            earlier.abort();
        }
    }

    /// Asks what a part of a cache keeps. Who cannot say so is not asked again.
    pub(super) fn inspect_cache(&mut self, volume: VolumeId, server: ServerId) {
        let (servers, notes, place) = (
            self.servers.clone(),
            self.messages.clone(),
            self.server_address(server),
        );
        self.tasks.spawn(async move {
            match servers.inspect_cache(volume, &place).await {
                Ok(seen) => send_event(&notes, Some(seen)).await,
                Err(error) => tracing::debug!(%volume, %error, "a cache is not inspected"),
            }
        });
    }

    /// Has a cache fetch what it lacks; nobody waits for it.
    pub(super) fn warm_volume(&mut self, id: VolumeId, server: ServerId) {
        let (servers, place) = (self.servers.clone(), self.server_address(server));
        self.tasks
            .spawn(async move { servers.warm_cache(id, &place).await });
    }

    /// Sends a file home.
    pub(super) fn extract_file(&mut self, extract: (ExtractionId, u32), source: MountedVolume) {
        let (servers, notes, now) = (self.servers.clone(), self.messages.clone(), wall_time_now());
        let place = source.server.map(|server| self.server_address(server));
        self.tasks.spawn(async move {
            let (index, sent) = (extract.1, servers.extract_file(now, extract, source, place));
            let sent = sent.await;
            // Before the run may end.
            if matches!(sent, Event::FileExtracted { .. }) {
                send_event(&notes, servers.identify_result(index).await).await;
            }
            send_event(&notes, Some(sent)).await;
        });
    }

    pub(super) fn delete_volume(&mut self, volume: VolumeId, server: ServerId) {
        let (servers, notes, place) = (
            self.servers.clone(),
            self.messages.clone(),
            self.server_address(server),
        );
        self.tasks.spawn(async move {
            let event = match servers.delete_volume(volume, &place).await {
                Ok(()) => Event::VolumeDeleted { volume },
                Err(_) => Event::VolumeDeleteFailed { volume },
            };
            send_event(&notes, Some(event)).await;
        });
    }

    /// What follows from nodes that do not answer; those of which that must be known are asked.
    pub(super) fn check_silent_nodes(&mut self) -> Vec<Event> {
        let mut contact = self.servers.connectivity();
        let events = contact.detect_failures(&self.scheduler, monotonic_now());
        for (_, address) in contact.nodes_to_probe(&self.scheduler, monotonic_now()) {
            let servers = self.servers.clone();
            self.tasks
                .spawn(async move { servers.probe_node(&address).await });
        }
        events
    }

    /// A node is given up: what it runs is not waited for.
    pub(super) fn stop_watching(&mut self, server: ServerId) {
        if let Some(watched) = self.watch_lists.get(&server) {
            watched.send_modify(|watched| watched.executions.clear());
        }
        if let Some(search) = self.volume_searches.remove(&server) {
            search.abort();
        }
    }

    /// The run ends. Results stay on nodes for the user to fetch, and work for the next run, for as
    /// long as was said.
    pub(super) async fn extend_result_lifetimes(&mut self) {
        let results = self.scheduler.result_volumes();
        let kept = self
            .scheduler
            .kept_volumes()
            .into_iter()
            .map(|kept| kept.id);
        let kept: BTreeSet<VolumeId> = kept.filter(|id| !results.contains(id)).collect();
        let mut tasks = JoinSet::new();
        for (wanted, are_results) in [(results, true), (kept, false)] {
            for (server, mut volumes) in self.scheduler.ready_volumes() {
                volumes.retain(|id| wanted.contains(id));
                if volumes.is_empty() {
                    continue;
                }
                let (servers, place) = (self.servers.clone(), self.server_address(server));
                let settings = &self.servers.settings;
                let (result_ms, keep_ms) = (settings.result_lifetime_ms, settings.keep_ms);
                tasks.spawn(async move {
                    match are_results {
                        true => servers.renew_volumes(&place, volumes, result_ms).await,
                        // Another run that wants the space gets it.
                        false => servers.give_way(&place, volumes, keep_ms).await,
                    }
                });
            }
        }
        while tasks.join_next().await.is_some() {}
    }
}
