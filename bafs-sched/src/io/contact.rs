//! Which servers answer, and whether the scheduler is cut off from all of them: when everybody is
//! silent at once it is not they who are gone. Makes no call.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;

use crate::logic::{Event, Scheduler, Settings};

/// So many nodes are asked at a time whether they are there; what so many say holds for all.
const ASKED_MAX: usize = 32;

/// Who answered within so long need not be asked, in milliseconds.
const FRESH_MS: u64 = 2_000;

/// A node that is silent and that the catalog lists lives, but not for this scheduler: it is given
/// up after so many times as long as one that is not listed.
const LISTED_FACTOR: u64 = 10;

/// When one address answered, and since when it does not.
#[derive(Debug, Clone, Copy, Default)]
struct Heard {
    answered: Option<Time>,
    silence: Option<Silence>,
}

impl Heard {
    fn has_answered_since(&self, since: Time) -> bool {
        self.answered.is_some_and(|at| at > since)
    }
}

#[derive(Debug, Clone, Copy)]
struct Silence {
    /// When the first call was made that nobody answered.
    since: Time,
    /// When that was noticed: who answers later is not silent for the same reason.
    noticed: Time,
}

/// What calls told of servers. Times are those of this process, so that no clock is set back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Contact {
    by_address: BTreeMap<String, Heard>,
    /// When the catalog answered last.
    catalog: Option<Time>,
    /// Who is in its last list.
    listed: BTreeSet<ServerId>,
    /// Since when no node answers, if the scheduler is cut off.
    cut_off: Option<Time>,
    /// Addresses of nodes.
    nodes: BTreeSet<String>,
    /// How many addresses were asked whether they are there.
    asked: usize,
}

impl Contact {
    /// The state of a scheduler that goes on with a run, at this time.
    pub(crate) fn resumed(scheduler: &Scheduler, now: Time) -> Self {
        let cut_off = scheduler.is_cut_off().then_some(now);
        Self {
            cut_off,
            ..Self::default()
        }
    }

    /// Somebody answered at this address.
    pub(crate) fn answered(&mut self, address: &str, now: Time) {
        let heard = self.by_address.entry(address.to_owned()).or_default();
        (heard.answered, heard.silence) = (Some(now), None);
    }

    /// Nobody answered a call that was made at this time, unless another one was answered since.
    pub(crate) fn unanswered(&mut self, address: &str, since: Time, now: Time) {
        let heard = self.by_address.entry(address.to_owned()).or_default();
        if !heard.has_answered_since(since) {
            let noticed = now;
            heard.silence.get_or_insert(Silence { since, noticed });
        }
    }

    /// The catalog answered with a list.
    pub(crate) fn listed(&mut self, nodes: impl Iterator<Item = ServerId>, now: Time) {
        self.catalog = Some(now);
        self.listed = nodes.collect();
    }

    /// Whether no node answered since then.
    pub(crate) fn is_nobody_heard_since(&self, since: Time) -> bool {
        let heard = self.nodes.iter();
        let mut heard = heard.filter_map(|address| self.by_address.get(address));
        !heard.any(|heard| heard.has_answered_since(since))
    }

    /// Whether the scheduler is cut off.
    pub(crate) fn is_cut_off(&self) -> bool {
        self.cut_off.is_some()
    }

    /// Whether a node answered lately, though the catalog may not list it.
    pub(crate) fn is_heard(&self, scheduler: &Scheduler, server: ServerId, now: Time) -> bool {
        let lost_after_ms = scheduler.settings().lost_after_ms;
        let answered = self.of(scheduler, server).answered;
        answered.is_some_and(|at| now.ms_since(at) < lost_after_ms)
    }

    /// Nodes that must be asked whether they are there.
    pub(crate) fn to_ask(&mut self, scheduler: &Scheduler, now: Time) -> Vec<(ServerId, String)> {
        let live: Vec<ServerId> = scheduler.live_nodes().collect();
        let is_silent = |server: &ServerId| self.of(scheduler, *server).silence.is_some();
        let is_doubtful = self.cut_off.is_some() || live.iter().any(is_silent);
        let is_due = |server: &ServerId| {
            let answered = self.of(scheduler, *server).answered;
            let is_fresh = answered.is_some_and(|at| now.ms_since(at) < FRESH_MS);
            !is_fresh && (is_doubtful || !scheduler.is_listed(*server))
        };
        let due: Vec<ServerId> = live.into_iter().filter(is_due).collect();
        let first = match due.len() {
            0 => return Vec::new(),
            len => self.asked % len,
        };
        let asked = due
            .iter()
            .cycle()
            .skip(first)
            .take(due.len().min(ASKED_MAX));
        let asked: Vec<_> = asked
            .filter_map(|server| Some((*server, scheduler.node(*server)?.address.clone())))
            .collect();
        self.asked = self.asked.wrapping_add(asked.len());
        asked
    }

    /// What follows from who answers and who does not.
    pub(crate) fn judge(&mut self, scheduler: &Scheduler, now: Time) -> Vec<Event> {
        let nodes = scheduler.nodes().map(|(_, seen)| seen.address.clone());
        self.nodes = nodes.collect();
        for (_, seen) in scheduler.nodes().filter(|(id, _)| scheduler.is_lost(*id)) {
            // It is asked anew when it is back.
            if let Some(heard) = self.by_address.get_mut(&seen.address) {
                heard.silence = None;
            }
        }
        let live: Vec<(ServerId, Heard)> = scheduler
            .live_nodes()
            .map(|server| (server, self.of(scheduler, server)))
            .collect();
        if let Some(since) = self.cut_off {
            return self.judge_cut_off(scheduler, since, &live, now);
        }
        let lost_after_ms = scheduler.settings().lost_after_ms;
        let mut events = Vec::new();
        for (server, heard) in &live {
            let silence = heard
                .silence
                .filter(|it| now.ms_since(it.since) > lost_after_ms);
            let Some(silence) = silence else {
                continue;
            };
            let others = || live.iter().filter(|(other, _)| other != server);
            if others().any(|(_, other)| other.has_answered_since(silence.noticed)) {
                let is_listed =
                    self.listed.contains(server) && self.has_catalog(lost_after_ms, now);
                let most_ms = match is_listed {
                    true => LISTED_FACTOR * lost_after_ms,
                    false => lost_after_ms,
                };
                if now.ms_since(silence.since) > most_ms {
                    events.push(Event::ServerSilent { server: *server });
                }
                continue;
            }
            // Who was not asked yet may be there.
            let silent = others()
                .filter(|(_, other)| other.silence.is_some())
                .count();
            if silent >= (live.len() - 1).min(ASKED_MAX - 1) {
                return vec![self.begin_cut_off(scheduler, &live, now)];
            }
        }
        events
    }

    fn begin_cut_off(
        &mut self,
        scheduler: &Scheduler,
        live: &[(ServerId, Heard)],
        now: Time,
    ) -> Event {
        let last = live.iter().filter_map(|(_, heard)| heard.answered).max();
        let silences = live.iter().filter_map(|(_, heard)| heard.silence);
        let first = silences.map(|silence| silence.since).min().unwrap_or(now);
        let since = last.unwrap_or(first);
        self.cut_off = Some(since);
        Event::CutOff {
            silent_ms: now.ms_since(since),
            has_catalog: self.has_catalog(scheduler.settings().lost_after_ms, now),
        }
    }

    fn judge_cut_off(
        &mut self,
        scheduler: &Scheduler,
        since: Time,
        live: &[(ServerId, Heard)],
        now: Time,
    ) -> Vec<Event> {
        let is_heard = |(_, heard): &(ServerId, Heard)| heard.has_answered_since(since);
        if live.iter().any(is_heard) {
            self.cut_off = None;
            // Who is not back yet is waited for as if it had fallen silent now.
            for heard in self
                .by_address
                .values_mut()
                .filter(|it| it.silence.is_some())
            {
                let (since, noticed) = (now, now);
                heard.silence = Some(Silence { since, noticed });
            }
            return vec![Event::Reached];
        }
        if now.ms_since(since) < longest_ms(scheduler.settings()) {
            return Vec::new();
        }
        self.cut_off = None;
        let silent = live.iter().map(|(server, _)| *server);
        silent
            .map(|server| Event::ServerSilent { server })
            .collect()
    }

    fn has_catalog(&self, lost_after_ms: u64, now: Time) -> bool {
        self.catalog
            .is_some_and(|at| now.ms_since(at) < lost_after_ms)
    }

    fn of(&self, scheduler: &Scheduler, server: ServerId) -> Heard {
        let address = scheduler.node(server).map(|node| &node.address);
        let heard = address.and_then(|address| self.by_address.get(address));
        heard.copied().unwrap_or_default()
    }
}

/// A scheduler that is cut off waits for so long, in milliseconds: as long as volumes live, or as
/// its user wants to wait.
fn longest_ms(settings: &Settings) -> u64 {
    settings.volume_lifetime_ms.max(settings.stuck_wait_ms)
}
