//! While the scheduler is cut off from all nodes: nobody is given up, nothing is begun, and no
//! patience ends, as while no scheduler runs. Whether it is so is decided where calls are made.

use crate::action::Action;
use crate::describe::describe_ms;
use crate::state::isolation::CutOff;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::{Phase, State};

impl State {
    /// Whether no node answers, and none is given up because of that.
    pub fn is_cut_off(&self) -> bool {
        self.cut_off.is_some()
    }

    /// Whether timers wait until a node answers. A run that ends waits for nobody.
    pub(crate) fn has_time_stopped(&self) -> bool {
        self.cut_off.is_some() && !matches!(self.phase, Phase::Finishing | Phase::Over)
    }

    pub(crate) fn begin_cut_off(&mut self, silent_ms: u64, has_catalog: bool) {
        if self.cut_off.is_some() {
            return;
        }
        let since = self.now;
        self.cut_off = Some(CutOff { since, silent_ms });
        let settings = &self.settings;
        let most_ms = settings.volume_lifetime_ms.max(settings.space_timeout_ms);
        let nodes = match self.fleet.alive {
            1 => "its only node".to_owned(),
            nodes => format!("any of its {nodes} nodes"),
        };
        let reached = match has_catalog {
            true => format!("reaches the catalog, but not {nodes}"),
            false => format!("reaches neither the catalog nor {nodes}"),
        };
        let text = format!(
            "the scheduler {reached} for {}: it waits up to {}, the lifetime of volumes; running \
             jobs continue; check the network",
            describe_ms(silent_ms),
            describe_ms(most_ms),
        );
        self.tell_of_link(text);
    }

    /// A node answers again: what was believed of all of them still holds, and what is not so any
    /// more they say when they are asked.
    pub(crate) fn end_cut_off(&mut self) {
        let Some(cut_off) = self.cut_off.take() else {
            return;
        };
        let away_ms = self.now.ms_since(cut_off.since);
        if self.phase != Phase::Finishing {
            self.put_off(away_ms);
        }
        let ready = self.ready_volumes();
        let volumes: usize = ready.values().map(Vec::len).sum();
        let probes = ready.into_iter();
        let probes = probes.map(|(server, volumes)| Action::ProbeVolumes { server, volumes });
        self.out.extend(probes);
        let text = format!(
            "the scheduler reaches nodes again after {}: the run continues with {} in progress and \
             {}",
            describe_ms(away_ms.saturating_add(cut_off.silent_ms)),
            counted(self.attempts.len(), "job"),
            counted(volumes, "volume"),
        );
        self.tell_of_link(text);
    }

    /// A node was given up, in whatever way. When that is so of the last one, the scheduler is not
    /// cut off any more: nobody is there.
    pub(crate) fn end_cut_off_without_nodes(&mut self) {
        if self.fleet.alive > 0 {
            return;
        }
        let Some(cut_off) = self.cut_off.take() else {
            return;
        };
        let away_ms = self.now.ms_since(cut_off.since);
        self.put_off(away_ms);
        let text = format!(
            "no node answered for {}: their volumes may be lost; when nodes return, jobs run again \
             if lost volumes are needed",
            describe_ms(away_ms.saturating_add(cut_off.silent_ms)),
        );
        self.tell_of_link(text);
    }

    fn tell_of_link(&mut self, text: String) {
        self.tell(RunWarning {
            job: None,
            volume: None,
            node: None,
            text,
        });
    }
}

fn counted(number: usize, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    }
}
