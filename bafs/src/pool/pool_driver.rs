//! Drives a pool: asks the batch system and the catalog, tells the controller, and does what it
//! wants. The controller decides.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use bafs_engine::logic::{
    Demand, NodeUse, PilotNumber, PilotStatus, PilotSummary, PoolAction, PoolController, PoolEvent,
};
use bafs_engine::{Engine, EngineError};
use bafs_proto::message::{Advert, ServerKind};
use bafs_proto::volume::VolumeKind;
use bafs_sched::driver::CancelHandle;
use tokio::sync::watch;

use super::pool_directory::{PoolDirectory, PoolFile};
use crate::client::ClusterClient;

/// Pause between two questions to the batch system: short after a change, twice as long after each
/// answer without one. A controller of Slurm answers `squeue` of one user within 10 ms here.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// A pool that is served.
pub(super) struct PoolDriver {
    engine: Arc<dyn Engine>,
    controller: PoolController,
    directory: PoolDirectory,
    client: ClusterClient,
    pool: PoolFile,
    began: Instant,
    written: Option<Vec<PilotSummary>>,
    shown: BTreeMap<PilotNumber, PilotStatus>,
    starved_run: Option<CancelHandle>,
}

impl PoolDriver {
    #[expect(clippy::disallowed_methods, reason = "a driver reads the clock")]
    pub(super) fn new(
        engine: Arc<dyn Engine>,
        controller: PoolController,
        directory: PoolDirectory,
        client: ClusterClient,
        pool: PoolFile,
    ) -> Self {
        Self {
            engine,
            controller,
            directory,
            client,
            pool,
            began: Instant::now(),
            written: None,
            shown: BTreeMap::new(),
            starved_run: None,
        }
    }

    /// Cancels a run when the pool is paused and has no pilot left: nobody would end its wait.
    #[must_use]
    pub(super) fn cancelling(mut self, run: CancelHandle) -> Self {
        self.starved_run = Some(run);
        self
    }

    /// Serves the pool until it is closed and its last pilot has gone. `report` gets each change,
    /// as a line.
    ///
    /// # Errors
    /// The directory of the pool cannot be written.
    pub(super) async fn run(
        mut self,
        mut demanded: watch::Receiver<Demand>,
        mut closed: watch::Receiver<bool>,
        report: impl Fn(&str),
    ) -> Result<()> {
        let mut pause = PAUSE_MIN;
        loop {
            let before = self.controller.pilots();
            let demand = *demanded.borrow_and_update();
            self.apply(PoolEvent::DemandChanged(demand), &report)
                .await?;
            if *closed.borrow_and_update() {
                self.apply(PoolEvent::CloseRequested, &report).await?;
            } else if let Some(nodes) = self.list_nodes(demand).await {
                self.apply(PoolEvent::NodesListed(nodes), &report).await?;
            }
            let polled = self.poll().await?;
            self.apply(polled, &report).await?;
            self.show_changes(&report);
            if self.controller.is_closed() {
                return self.directory.remove();
            }
            self.cancel_starved_run();
            pause = if self.controller.pilots() == before {
                PAUSE_MAX.min(pause * 2)
            } else {
                PAUSE_MIN
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                Ok(()) = demanded.changed() => {}
                Ok(()) = closed.changed() => pause = PAUSE_MIN,
            }
        }
    }

    async fn apply(&mut self, event: PoolEvent, report: &impl Fn(&str)) -> Result<()> {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now_ms = u64::try_from(self.began.elapsed().as_millis())?;
            let mut actions = Vec::new();
            self.controller.step(now_ms, event, &mut actions);
            self.write_pilots()?;
            for action in actions {
                events.extend(self.perform(action, report).await?);
            }
        }
        Ok(())
    }

    /// Before an action is done, it is written down.
    fn write_pilots(&mut self) -> Result<()> {
        let pilots = self.controller.pilots();
        if self.written.as_ref() != Some(&pilots) {
            self.directory
                .write_state(self.controller.next_number(), &pilots)?;
            self.written = Some(pilots);
        }
        Ok(())
    }

    async fn perform(
        &mut self,
        action: PoolAction,
        report: &impl Fn(&str),
    ) -> Result<Option<PoolEvent>> {
        match action {
            PoolAction::Check => self.check().await.map(Some),
            PoolAction::Submit(pilot) => self.submit(pilot).await.map(Some),
            PoolAction::Cancel(id) => {
                let asked = id.clone();
                let ended = self.call(move |engine| engine.cancel(&asked)).await?;
                Ok(ended.is_err().then_some(PoolEvent::CancelFailed(id)))
            }
            PoolAction::ReleaseName(pilot) => {
                let name = self.directory.pilot_name(pilot.0);
                let ended = self.call(move |engine| engine.cancel_named(&name)).await?;
                Ok(ended.is_ok().then_some(PoolEvent::NameReleased { pilot }))
            }
            PoolAction::CopySoleVolumes(pilot) => {
                // The run that owns the volumes frees or copies them; until then the node stays.
                report(&format!(
                    "pilot {pilot} is idle but keeps data that no other node has"
                ));
                Ok(None)
            }
            PoolAction::ReportPause(reason) => {
                report(&format!("no further pilots are submitted: {reason}"));
                let said = self
                    .directory
                    .read_pilot_log(self.controller.next_number() - 1);
                if !said.is_empty() {
                    report(&format!("the last pilot said: {said}"));
                }
                Ok(None)
            }
        }
    }

    async fn check(&self) -> Result<PoolEvent> {
        let number = self.controller.next_number();
        let pilot = self.directory.write_pilot(&self.pool, number)?;
        let checked = self.call(move |engine| engine.check(&pilot)).await?;
        let Err(refused) = checked else {
            return Ok(PoolEvent::Checked(Ok(())));
        };
        let is_missing = matches!(refused, EngineError::NotStarted { .. });
        if is_missing || self.call(|engine| engine.poll(&[])).await?.is_ok() {
            return Ok(PoolEvent::Checked(Err(refused.to_string())));
        }
        Ok(PoolEvent::EngineSilent)
    }

    async fn submit(&self, pilot: PilotNumber) -> Result<PoolEvent> {
        let spec = self.directory.write_pilot(&self.pool, pilot.0)?;
        let name = spec.name.clone();
        match self.call(move |engine| engine.submit(&spec)).await? {
            Ok(id) => Ok(PoolEvent::Submitted { pilot, id }),
            Err(refused) => {
                // A batch system that lost the answer may have the job all the same.
                let released = self.call(move |engine| engine.cancel_named(&name)).await?;
                Ok(match released {
                    Ok(()) => PoolEvent::SubmissionRejected {
                        pilot,
                        reason: refused.to_string(),
                    },
                    Err(_) => PoolEvent::SubmissionUnconfirmed { pilot },
                })
            }
        }
    }

    async fn poll(&self) -> Result<PoolEvent> {
        let ids = self.controller.ids();
        let polled = self.call(move |engine| engine.poll(&ids)).await?;
        Ok(polled.map_or_else(
            |error| {
                tracing::warn!("{error}; pilots that run go on");
                PoolEvent::EngineSilent
            },
            PoolEvent::Polled,
        ))
    }

    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn Engine) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<Result<T, EngineError>> {
        let engine = Arc::clone(&self.engine);
        Ok(tokio::task::spawn_blocking(move || call(engine.as_ref())).await?)
    }

    /// Nodes of this pool by the catalog; nothing when it does not answer.
    async fn list_nodes(&self, demand: Demand) -> Option<BTreeMap<PilotNumber, NodeUse>> {
        let servers = self
            .client
            .list_servers(Some(ServerKind::Node))
            .await
            .ok()?;
        let mut nodes = BTreeMap::new();
        for node in servers {
            let Some(pilot) = self.directory.parse_pilot_name(&node.name) else {
                continue;
            };
            // Only a surplus node may have to end.
            let is_surplus = node.jobs == 0 && demand.nodes < self.controller.ids().len();
            let sole_copies = if is_surplus {
                self.count_scratch_volumes(&node).await
            } else {
                0
            };
            let node_use = NodeUse {
                jobs: node.jobs,
                sole_copies,
            };
            nodes.insert(pilot, node_use);
        }
        Some(nodes)
    }

    /// Scratch volumes of a node. Each counts as the only copy: the scheduler that owns it deletes
    /// what it no longer needs. A node that does not answer counts as holding one.
    async fn count_scratch_volumes(&self, node: &Advert) -> u32 {
        let Ok(volumes) = self.client.list_node_volumes(node).await else {
            return 1;
        };
        let is_scratch = |kind: &VolumeKind| matches!(kind, VolumeKind::Scratch { .. });
        let count = volumes
            .iter()
            .filter(|volume| is_scratch(&volume.spec.kind))
            .count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn show_changes(&mut self, report: &impl Fn(&str)) {
        let pilots = self.controller.pilots();
        for pilot in &pilots {
            if self.shown.insert(pilot.pilot, pilot.status) == Some(pilot.status) {
                continue;
            }
            let id = pilot.id.as_ref().map_or("-", |id| id.0.as_str());
            let status = match pilot.status {
                PilotStatus::Submitting => continue,
                PilotStatus::Queued => "is queued",
                PilotStatus::Starting => "starts",
                PilotStatus::Alive => "is a node",
                PilotStatus::Leaving => "is being ended",
            };
            report(&format!(
                "pilot {} ({} {id}) {status}",
                pilot.pilot, self.pool.engine
            ));
        }
        let shown = std::mem::take(&mut self.shown);
        for (number, status) in shown {
            if pilots.iter().any(|pilot| pilot.pilot == number) {
                self.shown.insert(number, status);
            } else {
                report(&format!("pilot {number} has ended"));
            }
        }
    }

    fn cancel_starved_run(&self) {
        if let (Some(run), Some(_)) = (&self.starved_run, self.controller.pause())
            && self.controller.pilots().is_empty()
        {
            run.request_cancel();
        }
    }
}
