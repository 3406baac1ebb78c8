//! Which servers answer, and whether the scheduler is cut off from all of them: when everybody is
//! silent at once it is not they who are gone. Makes no call.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;

use crate::{Event, Scheduler, Settings};

/// So many nodes are asked at a time whether they are there; what so many say holds for all.
const CONCURRENT_PROBES_MAX: usize = 32;

/// Who answered within so long need not be asked, in milliseconds.
const RECENT_ANSWER_MS: u64 = 2_000;

/// A node that is silent and that the catalog lists lives, but not for this scheduler: it is given
/// up after so many times as long as one that is not listed.
const LISTED_NODE_TIMEOUT_FACTOR: u64 = 10;

/// When one address answered, and since when it does not.
#[derive(Debug, Clone, Copy, Default)]
struct AddressStatus {
    last_answer: Option<Time>,
    silence: Option<Silence>,
}

impl AddressStatus {
    fn has_answered_since(&self, since: Time) -> bool {
        self.last_answer.is_some_and(|at| at > since)
    }
}

#[derive(Debug, Clone, Copy)]
struct Silence {
    /// When the first call was made that nobody answered.
    first_failed_call: Time,
    /// When that was noticed: who answers later is not silent for the same reason.
    noticed_at: Time,
}

/// What calls told of servers. Times are those of this process, so that no clock is set back.
#[derive(Debug, Clone, Default)]
pub struct Connectivity {
    by_address: BTreeMap<String, AddressStatus>,
    /// When the catalog answered last.
    catalog_last_answer: Option<Time>,
    /// Who is in its last list.
    listed_nodes: BTreeSet<ServerId>,
    /// Since when no node answers, if the scheduler is cut off.
    cut_off_since: Option<Time>,
    /// Addresses of nodes.
    node_addresses: BTreeSet<String>,
    /// How many addresses were asked whether they are there.
    addresses_probed: usize,
}

impl Connectivity {
    /// The state of a scheduler that goes on with a run, at this time.
    pub fn for_resumed_run(scheduler: &Scheduler, now: Time) -> Self {
        let cut_off = scheduler.is_cut_off().then_some(now);
        Self {
            cut_off_since: cut_off,
            ..Self::default()
        }
    }

    /// Somebody answered at this address.
    pub fn note_answer(&mut self, address: &str, now: Time) {
        if self.node_addresses.contains(address) {
            self.restart_silences_of_all(now);
        }
        let heard = self.by_address.entry(address.to_owned()).or_default();
        (heard.last_answer, heard.silence) = (Some(now), None);
    }

    /// A node is about to answer. A time in which no node was heard counts against none of them: a
    /// node that is silent beside it is waited for as if it had fallen silent now.
    fn restart_silences_of_all(&mut self, now: Time) {
        let answers = self.node_addresses.iter();
        let answers = answers.filter_map(|address| self.by_address.get(address)?.last_answer);
        let last = answers.max();
        for heard in self.by_address.values_mut() {
            let Some(silence) = &mut heard.silence else {
                continue;
            };
            let was_nobody_heard = last.is_none_or(|last| last <= silence.noticed_at);
            if was_nobody_heard && now.ms_since(silence.noticed_at) > RECENT_ANSWER_MS {
                (silence.first_failed_call, silence.noticed_at) = (now, now);
            }
        }
    }

    /// Nobody answered a call that was made at this time, unless another one was answered since.
    pub fn note_silence(&mut self, address: &str, since: Time, now: Time) {
        let heard = self.by_address.entry(address.to_owned()).or_default();
        if !heard.has_answered_since(since) {
            let noticed = now;
            heard.silence.get_or_insert(Silence {
                first_failed_call: since,
                noticed_at: noticed,
            });
        }
    }

    /// The catalog answered with a list.
    pub fn note_listing(&mut self, nodes: impl Iterator<Item = ServerId>, now: Time) {
        self.catalog_last_answer = Some(now);
        self.listed_nodes = nodes.collect();
    }

    /// Whether no node answered since then.
    pub fn is_every_node_silent_since(&self, since: Time) -> bool {
        let heard = self.node_addresses.iter();
        let mut heard = heard.filter_map(|address| self.by_address.get(address));
        !heard.any(|heard| heard.has_answered_since(since))
    }

    /// Whether the scheduler is cut off.
    pub fn is_cut_off(&self) -> bool {
        self.cut_off_since.is_some()
    }

    /// Whether a node answered lately, though the catalog may not list it.
    pub fn has_recent_answer(&self, scheduler: &Scheduler, server: ServerId, now: Time) -> bool {
        let lost_after_ms = scheduler.settings().node_timeout_ms;
        let answered = self.status_of(scheduler, server).last_answer;
        answered.is_some_and(|at| now.ms_since(at) < lost_after_ms)
    }

    /// Nodes that must be asked whether they are there.
    pub fn nodes_to_probe(&mut self, scheduler: &Scheduler, now: Time) -> Vec<(ServerId, String)> {
        let live: Vec<ServerId> = scheduler.live_nodes().collect();
        let is_silent = |server: &ServerId| self.status_of(scheduler, *server).silence.is_some();
        let is_doubtful = self.cut_off_since.is_some() || live.iter().any(is_silent);
        let is_due = |server: &ServerId| {
            let answered = self.status_of(scheduler, *server).last_answer;
            let is_fresh = answered.is_some_and(|at| now.ms_since(at) < RECENT_ANSWER_MS);
            !is_fresh && (is_doubtful || !scheduler.is_listed(*server))
        };
        let due: Vec<ServerId> = live.into_iter().filter(is_due).collect();
        let first = match due.len() {
            0 => return Vec::new(),
            len => self.addresses_probed % len,
        };
        let asked = due
            .iter()
            .cycle()
            .skip(first)
            .take(due.len().min(CONCURRENT_PROBES_MAX));
        let asked: Vec<_> = asked
            .filter_map(|server| Some((*server, scheduler.node(*server)?.address.clone())))
            .collect();
        self.addresses_probed = self.addresses_probed.wrapping_add(asked.len());
        asked
    }

    /// What follows from who answers and who does not.
    pub fn detect_failures(&mut self, scheduler: &Scheduler, now: Time) -> Vec<Event> {
        let nodes = scheduler.nodes().map(|(_, seen)| seen.address.clone());
        self.node_addresses = nodes.collect();
        for (_, seen) in scheduler.nodes().filter(|(id, _)| scheduler.is_lost(*id)) {
            // It is asked anew when it is back.
            if let Some(heard) = self.by_address.get_mut(&seen.address) {
                heard.silence = None;
            }
        }
        let live: Vec<(ServerId, AddressStatus)> = scheduler
            .live_nodes()
            .map(|server| (server, self.status_of(scheduler, server)))
            .collect();
        if let Some(since) = self.cut_off_since {
            return self.evaluate_cut_off(scheduler, since, &live, now);
        }
        let lost_after_ms = scheduler.settings().node_timeout_ms;
        let mut events = Vec::new();
        for (server, heard) in &live {
            let silence = heard
                .silence
                .filter(|it| now.ms_since(it.first_failed_call) > lost_after_ms);
            let Some(silence) = silence else {
                continue;
            };
            let others = || live.iter().filter(|(other, _)| other != server);
            // An answer between two cuts tells nothing of now: its node is silent again.
            let is_evidence = |other: &AddressStatus| {
                other.silence.is_none() && other.has_answered_since(silence.noticed_at)
            };
            if others().any(|(_, other)| is_evidence(other)) {
                let is_listed =
                    self.listed_nodes.contains(server) && self.has_catalog(lost_after_ms, now);
                let most_ms = match is_listed {
                    true => LISTED_NODE_TIMEOUT_FACTOR * lost_after_ms,
                    false => lost_after_ms,
                };
                if now.ms_since(silence.first_failed_call) > most_ms {
                    events.push(Event::ServerSilent { server: *server });
                }
                continue;
            }
            // Who was not asked yet may be there.
            let silent = others()
                .filter(|(_, other)| other.silence.is_some())
                .count();
            if silent >= (live.len() - 1).min(CONCURRENT_PROBES_MAX - 1) {
                return vec![self.begin_cut_off(scheduler, &live, now)];
            }
        }
        events
    }

    fn begin_cut_off(
        &mut self,
        scheduler: &Scheduler,
        live: &[(ServerId, AddressStatus)],
        now: Time,
    ) -> Event {
        let last = live.iter().filter_map(|(_, heard)| heard.last_answer).max();
        let silences = live.iter().filter_map(|(_, heard)| heard.silence);
        let first = silences
            .map(|silence| silence.first_failed_call)
            .min()
            .unwrap_or(now);
        let since = last.unwrap_or(first);
        self.cut_off_since = Some(since);
        Event::CutOff {
            silent_ms: now.ms_since(since),
            has_catalog: self.has_catalog(scheduler.settings().node_timeout_ms, now),
        }
    }

    fn evaluate_cut_off(
        &mut self,
        scheduler: &Scheduler,
        since: Time,
        live: &[(ServerId, AddressStatus)],
        now: Time,
    ) -> Vec<Event> {
        let is_heard = |(_, heard): &(ServerId, AddressStatus)| heard.has_answered_since(since);
        if live.iter().any(is_heard) {
            self.cut_off_since = None;
            // Who is not back yet is waited for as if it had fallen silent now.
            for heard in self
                .by_address
                .values_mut()
                .filter(|it| it.silence.is_some())
            {
                let (since, noticed) = (now, now);
                heard.silence = Some(Silence {
                    first_failed_call: since,
                    noticed_at: noticed,
                });
            }
            return vec![Event::Reconnected];
        }
        if now.ms_since(since) < cut_off_ms_max(scheduler.settings()) {
            return Vec::new();
        }
        self.cut_off_since = None;
        let silent = live.iter().map(|(server, _)| *server);
        silent
            .map(|server| Event::ServerSilent { server })
            .collect()
    }

    fn has_catalog(&self, lost_after_ms: u64, now: Time) -> bool {
        self.catalog_last_answer
            .is_some_and(|at| now.ms_since(at) < lost_after_ms)
    }

    fn status_of(&self, scheduler: &Scheduler, server: ServerId) -> AddressStatus {
        let address = scheduler.node(server).map(|node| &node.address);
        let heard = address.and_then(|address| self.by_address.get(address));
        heard.copied().unwrap_or_default()
    }
}

/// A scheduler that is cut off waits for so long, in milliseconds: as long as volumes live, or as
/// its user wants to wait.
fn cut_off_ms_max(settings: &Settings) -> u64 {
    settings.volume_lifetime_ms.max(settings.space_timeout_ms)
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;
    use bafs_workflow::parse_workflow;

    use super::*;
    use crate::{NodeInfo, Space};

    const LOST_MS: u64 = 6_000;

    struct ConnectivityFixture {
        scheduler: Scheduler,
        contact: Connectivity,
        now: Time,
    }

    impl ConnectivityFixture {
        fn with_nodes(nodes: u64) -> Self {
            let text = "job a {\nexecutable = x\n}\n";
            let parsed = parse_workflow("w", text, &|_| unreachable!()).unwrap();
            let settings = Settings::default();
            let mut scheduler = Scheduler::new(RunId(1), parsed.workflow, settings);
            let capacity = Space {
                bytes: 1_000,
                files: 10,
            };
            let nodes = (1..=nodes).map(|id| NodeInfo::single_group(ServerId(id), capacity, 1));
            let seen = Event::nodes_listed(nodes.collect());
            scheduler.step(Time(1), seen, &mut Vec::new());
            Self {
                scheduler,
                contact: Connectivity::default(),
                now: Time(1_000_000),
            }
        }

        /// Seconds in which only these nodes answer, and perhaps the catalog. The job of the first
        /// node is waited for.
        fn pass_seconds(
            &mut self,
            seconds: u64,
            there: &[u64],
            listed: Option<&[u64]>,
        ) -> Vec<Event> {
            let mut told = Vec::new();
            for _ in 0..seconds {
                self.now = self.now.plus_ms(1_000);
                if let Some(listed) = listed {
                    let listed = listed.iter().copied().map(ServerId);
                    self.contact.note_listing(listed, self.now);
                }
                let mut asked = self.contact.nodes_to_probe(&self.scheduler, self.now);
                asked.push((ServerId(1), "n1:1".to_owned()));
                for (server, address) in asked {
                    match there.contains(&server.0) {
                        true => self.contact.note_answer(&address, self.now),
                        false => self.contact.note_silence(&address, self.now, self.now),
                    }
                }
                for event in self.contact.detect_failures(&self.scheduler, self.now) {
                    self.scheduler
                        .step(self.now, event.clone(), &mut Vec::new());
                    told.push(event);
                }
            }
            told
        }
    }

    #[test]
    fn silence_of_all_counts_against_no_node() {
        let mut world = ConnectivityFixture::with_nodes(4);
        world.pass_seconds(3, &[1, 2, 3, 4], Some(&[1, 2, 3, 4]));
        let mut told = world.pass_seconds(6, &[], None);
        told.extend(world.pass_seconds(2, &[2], None));
        assert_eq!(told, []);
        let told = world.pass_seconds(20, &[], None);
        assert!(matches!(told[..], [Event::CutOff { .. }]), "{told:?}");
    }

    #[test]
    fn node_heard_between_two_cuts_is_no_evidence() {
        let mut world = ConnectivityFixture::with_nodes(4);
        world.pass_seconds(3, &[1, 2, 3, 4], Some(&[1, 2, 3, 4]));
        let mut told = world.pass_seconds(5, &[], None);
        told.extend(world.pass_seconds(1, &[2], Some(&[1, 2, 3, 4])));
        told.extend(world.pass_seconds(20, &[], None));
        assert!(matches!(told[..], [Event::CutOff { .. }]), "{told:?}");
        let told = world.pass_seconds(3, &[1, 2, 3, 4], Some(&[1, 2, 3, 4]));
        assert_eq!(told, [Event::Reconnected]);
    }

    fn silent_event(id: u64) -> Event {
        Event::ServerSilent {
            server: ServerId(id),
        }
    }

    #[test]
    fn one_silent_node_is_lost_while_others_answer() {
        let mut cluster = ConnectivityFixture::with_nodes(3);
        assert_eq!(cluster.pass_seconds(2, &[1, 2, 3], Some(&[1, 2, 3])), []);
        let told = cluster.pass_seconds(LOST_MS / 1_000 + 2, &[2, 3], Some(&[2, 3]));
        assert_eq!(told, [silent_event(1)]);
    }

    #[test]
    fn silence_of_all_nodes_cuts_the_scheduler_off() {
        for catalog in [None, Some(&[][..])] {
            let mut cluster = ConnectivityFixture::with_nodes(5);
            cluster.pass_seconds(2, &[1, 2, 3, 4, 5], Some(&[1, 2, 3, 4, 5]));
            let told = cluster.pass_seconds(60, &[], catalog);
            assert!(matches!(told[..], [Event::CutOff { .. }]), "{told:?}");
            assert!(cluster.scheduler.is_cut_off());
            // One is back, then the others: none is given up meanwhile.
            assert_eq!(cluster.pass_seconds(3, &[4], None), [Event::Reconnected]);
            assert_eq!(cluster.pass_seconds(30, &[1, 2, 3, 4, 5], None), []);
        }
    }

    #[test]
    fn lone_silent_node_counts_as_a_cut() {
        let mut cluster = ConnectivityFixture::with_nodes(1);
        cluster.pass_seconds(2, &[1], Some(&[1]));
        let told = cluster.pass_seconds(60, &[], Some(&[]));
        assert!(matches!(told[..], [Event::CutOff { .. }]), "{told:?}");
    }

    #[test]
    fn node_still_silent_after_a_cut_is_lost() {
        let mut cluster = ConnectivityFixture::with_nodes(3);
        cluster.pass_seconds(2, &[1, 2, 3], Some(&[1, 2, 3]));
        cluster.pass_seconds(30, &[], None);
        assert_eq!(cluster.pass_seconds(1, &[2, 3], None), [Event::Reconnected]);
        assert_eq!(
            cluster.pass_seconds(4, &[2, 3], None),
            [],
            "it may be later"
        );
        assert_eq!(cluster.pass_seconds(8, &[2, 3], None), [silent_event(1)]);
    }

    #[test]
    fn silent_listed_node_is_lost_later() {
        let mut cluster = ConnectivityFixture::with_nodes(2);
        cluster.pass_seconds(2, &[1, 2], Some(&[1, 2]));
        assert_eq!(cluster.pass_seconds(50, &[2], Some(&[1, 2])), []);
        assert_eq!(
            cluster.pass_seconds(20, &[2], Some(&[1, 2])),
            [silent_event(1)]
        );
    }

    #[test]
    fn cut_beyond_the_volume_lifetime_loses_all_nodes() {
        let mut cluster = ConnectivityFixture::with_nodes(2);
        cluster.pass_seconds(2, &[1, 2], None);
        let seconds = Settings::default().volume_lifetime_ms / 1_000;
        let told = cluster.pass_seconds(seconds - 1, &[], None);
        assert!(matches!(told[..], [Event::CutOff { .. }]), "{told:?}");
        assert_eq!(
            cluster.pass_seconds(2, &[], None),
            [silent_event(1), silent_event(2)]
        );
        assert!(!cluster.scheduler.is_cut_off());
    }

    #[test]
    fn unlisted_node_is_heard_while_it_answers() {
        let mut cluster = ConnectivityFixture::with_nodes(2);
        cluster.pass_seconds(2, &[1, 2], Some(&[1, 2]));
        let missed = Event::NodesListed {
            nodes: Vec::new(),
            unlisted: vec![ServerId(2)],
        };
        cluster.scheduler.step(cluster.now, missed, &mut Vec::new());
        cluster.pass_seconds(1, &[1, 2], Some(&[1]));
        let (contact, scheduler) = (&cluster.contact, &cluster.scheduler);
        assert!(contact.has_recent_answer(scheduler, ServerId(2), cluster.now));
    }
}
