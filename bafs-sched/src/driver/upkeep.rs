//! What a run does beside its steps: it keeps its volumes alive, follows nodes to their addresses,
//! hears its user, and shares nodes with other runs. Decides nothing.

use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::allotment::NodeQuotaList;
use bafs_proto::ids::{ExtractionId, ServerId, VolumeId};
use tokio::task::JoinSet;

use super::{Driver, Note, now, send, tick};
use crate::io::shares::Moment;
use crate::io::steer;
use crate::logic::{Event, MountedVolume};

/// How long the end of a run waits for nodes that do not answer, in milliseconds.
const PARTING_MS: u64 = 1_000;

impl Driver {
    /// What users wished since the last time.
    pub(super) fn wishes(&mut self) -> Vec<Event> {
        let from = self.read_wishes.max(self.scheduler.wishes());
        let (run, workflow) = (self.scheduler.run(), self.scheduler.workflow());
        let (wishes, lines) = steer::read(&self.wishes_of, run, workflow, from);
        self.read_wishes = from + lines;
        wishes
            .into_iter()
            .map(|(count, wish)| {
                if wish.is_none() {
                    tracing::warn!(count, "a wish was not understood");
                }
                Event::Steered { count, wish }
            })
            .collect()
    }

    /// Asks nodes to keep a part for this run, and gives back what others are to have: the core
    /// uses it no more before a node is told.
    pub(super) async fn share(&mut self) -> Result<()> {
        let Some(shares) = &mut self.shares else {
            return Ok(());
        };
        let moment = Moment {
            now: now(),
            tick: tick(),
        };
        let (smaller, calls) = shares.due(moment, &self.scheduler);
        if !smaller.is_empty() {
            let event = Event::SharesSeen { shares: smaller };
            self.take(vec![event]).await?;
        }
        for (server, call) in calls {
            let (servers, notes) = (self.servers.clone(), self.notes.clone());
            let place = self.place(server);
            self.tasks.spawn(async move {
                let answer = servers.allot(&place.address, call).await;
                // The loop ended: nobody waits for this any more.
                let _ = notes.send(Note::Allotted(server, answer)).await;
            });
        }
        Ok(())
    }

    /// Takes what a node keeps for this run, or why it keeps nothing.
    pub(super) fn allotted(
        &mut self,
        server: ServerId,
        answer: Result<NodeQuotaList>,
    ) -> Option<Event> {
        let shares = self.shares.as_mut()?;
        let shares = match answer {
            Ok(answer) => shares.answered(server, answer),
            Err(error) => {
                let (is_news, told) = shares.refused(server, &error);
                let is_hopeless = shares.is_hopeless();
                let node = self.scheduler.node(server).map(|node| node.name.clone());
                let node = node.unwrap_or_else(|| server.to_string());
                if is_news {
                    tracing::warn!(node, %error, "the node keeps no part of itself for this run");
                } else {
                    tracing::debug!(node, %error, "the node keeps nothing yet");
                }
                if is_hopeless {
                    let doing = format_args!("node {node} keeps no part of itself for this run");
                    self.no_part = Some(error.context(doing));
                }
                told
            }
        };
        (!shares.is_empty()).then_some(Event::SharesSeen { shares })
    }

    /// Gives back what nodes keep for this run; those that do not hear it forget it soon, and
    /// nobody waits long for them.
    pub(super) async fn unshare(&mut self) {
        let calls = self.shares.as_ref().map(|shares| shares.end(now()));
        let mut tasks = JoinSet::new();
        for (server, call) in calls.unwrap_or_default() {
            if self.scheduler.is_lost(server) {
                continue;
            }
            let (servers, place) = (self.servers.clone(), self.place(server));
            tasks.spawn(async move {
                if let Err(error) = servers.allot(&place.address, call).await {
                    tracing::debug!(node = place.address, %error, "the node forgets this run soon");
                }
            });
        }
        let told = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_millis(PARTING_MS), told).await;
    }

    /// A node that came back may listen elsewhere.
    pub(super) fn follow_addresses(&mut self) {
        for (server, watched) in &self.watched {
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
    pub(super) fn renew(&mut self) {
        let results = self.scheduler.volumes_with_results();
        for (server, volumes) in self.scheduler.ready_volumes() {
            let (with, without): (Vec<_>, Vec<_>) =
                volumes.into_iter().partition(|id| results.contains(id));
            self.renew_on(server, with, self.servers.settings.result_lifetime_ms);
            self.renew_on(server, without, 0);
        }
    }

    /// Asks for volumes of a server, and tells the core which are gone.
    pub(super) fn renew_on(&mut self, server: ServerId, volumes: Vec<VolumeId>, lifetime_ms: u64) {
        if volumes.is_empty() {
            return;
        }
        let (servers, notes, place) =
            (self.servers.clone(), self.notes.clone(), self.place(server));
        self.tasks.spawn(async move {
            match servers.renew(&place, volumes, lifetime_ms).await {
                // That everything is well is not worth a record.
                Ok(lost) if lost.is_empty() => {}
                Ok(lost) => send(&notes, Some(Event::VolumesProbed { server, lost })).await,
                Err(error) => tracing::debug!(node = place.address, %error, "volumes not renewed"),
            }
        });
    }

    /// Asks a node that is back which of these volumes it has; one that does not answer has none.
    pub(super) fn find(&mut self, server: ServerId, volumes: Vec<VolumeId>) {
        let (servers, notes, place) =
            (self.servers.clone(), self.notes.clone(), self.place(server));
        self.tasks.spawn(async move {
            let mut found = volumes.clone();
            match servers.renew(&place, volumes, 0).await {
                Ok(lost) => found.retain(|id| !lost.contains(id)),
                Err(_) => found.clear(),
            }
            send(&notes, Some(Event::VolumesFound { server, found })).await;
        });
    }

    /// Asks what a part of a cache keeps. Who cannot say so is not asked again.
    pub(super) fn look_at_cache(&mut self, volume: VolumeId, server: ServerId) {
        let (servers, notes, place) =
            (self.servers.clone(), self.notes.clone(), self.place(server));
        self.tasks.spawn(async move {
            match servers.look_at_cache(volume, &place).await {
                Ok(seen) => send(&notes, Some(seen)).await,
                Err(error) => tracing::debug!(%volume, %error, "a cache is not looked at"),
            }
        });
    }

    /// Has a cache fetch what it lacks; nobody waits for it.
    pub(super) fn warm(&mut self, id: VolumeId, server: ServerId) {
        let (servers, place) = (self.servers.clone(), self.place(server));
        self.tasks
            .spawn(async move { servers.warm(id, &place).await });
    }

    /// Sends a file home.
    pub(super) fn send_home(&mut self, extract: (ExtractionId, u32), source: MountedVolume) {
        let (servers, notes, now) = (self.servers.clone(), self.notes.clone(), now());
        let place = source.server.map(|server| self.place(server));
        self.tasks.spawn(async move {
            let sent = servers.extract(now, extract, source, place);
            send(&notes, Some(sent.await)).await;
        });
    }

    pub(super) fn delete(&mut self, volume: VolumeId, server: ServerId) {
        let (servers, notes, place) =
            (self.servers.clone(), self.notes.clone(), self.place(server));
        self.tasks.spawn(async move {
            let event = match servers.delete(volume, &place).await {
                Ok(()) => Event::VolumeDeleted { volume },
                Err(_) => Event::VolumeDeleteFailed { volume },
            };
            send(&notes, Some(event)).await;
        });
    }

    /// What follows from nodes that do not answer; those of which that must be known are asked.
    pub(super) fn judge_silence(&mut self) -> Vec<Event> {
        let mut contact = self.servers.contact();
        let events = contact.judge(&self.scheduler, tick());
        for (_, address) in contact.nodes_to_ask(&self.scheduler, tick()) {
            let servers = self.servers.clone();
            self.tasks.spawn(async move { servers.ask(&address).await });
        }
        events
    }

    /// A node is given up: what it runs is not waited for.
    pub(super) fn watch_no_more(&mut self, server: ServerId) {
        if let Some(watched) = self.watched.get(&server) {
            watched.send_modify(|watched| watched.executions.clear());
        }
    }

    /// The run ends, and results stay on nodes for the user to fetch: for as long as was said.
    pub(super) async fn leave_results(&mut self) {
        let results = self.scheduler.volumes_with_results();
        let lifetime_ms = self.servers.settings.result_lifetime_ms;
        let mut tasks = JoinSet::new();
        for (server, mut volumes) in self.scheduler.ready_volumes() {
            volumes.retain(|id| results.contains(id));
            if volumes.is_empty() {
                continue;
            }
            let (servers, place) = (self.servers.clone(), self.place(server));
            tasks.spawn(async move { servers.renew(&place, volumes, lifetime_ms).await });
        }
        while tasks.join_next().await.is_some() {}
    }
}
