//! What a run does beside its steps: it keeps its volumes alive, follows nodes to their addresses,
//! hears its user, and shares nodes with other runs. Decides nothing.

use bafs_proto::Result;
use bafs_proto::allotment::Allotments;
use bafs_proto::ids::ServerId;
use tokio::task::JoinSet;

use super::{Driver, Note, now, send, tick};
use crate::io::shares::Moment;
use crate::io::steer;
use crate::logic::Event;

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
        answer: Result<Allotments>,
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

    /// Gives back what nodes keep for this run; those that do not hear it forget it soon.
    pub(super) async fn unshare(&mut self) {
        let calls = self.shares.as_ref().map(|shares| shares.end(now()));
        let mut tasks = JoinSet::new();
        for (server, call) in calls.unwrap_or_default() {
            let (servers, place) = (self.servers.clone(), self.place(server));
            tasks.spawn(async move {
                if let Err(error) = servers.allot(&place.address, call).await {
                    tracing::debug!(node = place.address, %error, "the node forgets this run soon");
                }
            });
        }
        while tasks.join_next().await.is_some() {}
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

    /// Keeps volumes alive, well before their servers would delete them.
    pub(super) fn renew(&mut self) {
        for (server, volumes) in self.scheduler.ready_volumes() {
            let (servers, notes, place) =
                (self.servers.clone(), self.notes.clone(), self.place(server));
            self.tasks.spawn(async move {
                let probed = servers.renew(&place, volumes).await;
                // That everything is well is not worth a record.
                if let Some(Event::VolumesProbed { lost, .. }) = &probed
                    && !lost.is_empty()
                {
                    send(&notes, probed).await;
                }
            });
        }
    }
}
