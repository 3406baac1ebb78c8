//! Checks the capability of every request; remembers what it checked for a short while. Whoever
//! asks chooses what a check costs, so that a check which is not remembered waits for its turn,
//! away from the threads that answer: one at a time for each connection, and few for all of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::time::Time;
use bafs_proto::token::{OpenToken, Resource, Right, Token, Verifier};
use tokio::sync::Semaphore;

use crate::clock;

/// A verdict is believed for so long; bounds how late an expiry takes effect.
const MEMORY_MS: u64 = 5_000;

/// Most verdicts remembered: a signature check costs about 100 µs, a look-up under 1 µs.
const VERDICTS_MAX: usize = 16_384;

/// Checks of one request that are made before others have a turn.
const CHECKS_AT_ONCE: usize = 32;

/// Most tokens kept whose signatures were checked; each takes some kilobytes.
const TOKENS_MAX: usize = 256;

/// Refusals of one connection that cost it nothing: agents ask with tokens that have just expired.
const REFUSALS_FREE: u32 = 64;

/// Each further refusal makes the next check of the connection wait so much longer,
const REFUSAL_PAUSE: Duration = Duration::from_millis(10);

/// but not over this.
const REFUSAL_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Refusals are forgotten when a connection had none for so long, in milliseconds.
const REFUSALS_MS: u64 = 60_000;

/// Most connections about which something is remembered; beyond, those with the oldest refusals are
/// forgotten.
const CONNECTIONS_MAX: usize = 4096;

/// What one request needs: by which token, on what, which right.
pub(crate) type Need = (Arc<Token>, Resource, Right);

/// How much work the checks were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Tokens whose signatures were checked.
    pub opened: u64,
    /// Evaluations of what a token grants.
    pub evaluated: u64,
}

/// Checks capabilities against the cluster's public key. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Access(Arc<Checks>);

#[derive(Debug)]
struct Checks {
    verifier: Verifier,
    /// Where others reach the server, for tokens that are good at one server only.
    address: Option<String>,
    verdicts: Mutex<BTreeMap<Need, (Time, Result<()>)>>,
    opened: Mutex<BTreeMap<Token, OpenToken>>,
    connections: Mutex<BTreeMap<String, Connection>>,
    /// Checks that may be under way at once.
    at_once: Semaphore,
    effort: (AtomicU64, AtomicU64),
}

/// What is known of one connection, by the address of its other end.
#[derive(Debug, Clone)]
struct Connection {
    turn: Arc<tokio::sync::Mutex<()>>,
    refusals: u32,
    last: Time,
}

impl Access {
    /// A checker that believes tokens of this verifier's authority.
    pub fn new(verifier: Verifier) -> Self {
        Self::of(verifier, None)
    }

    /// As [`Self::new`], of a server that others reach at `address`: it also believes tokens that
    /// are for it alone.
    pub fn at(verifier: Verifier, address: String) -> Self {
        Self::of(verifier, Some(address))
    }

    fn of(verifier: Verifier, address: Option<String>) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        Self(Arc::new(Checks {
            verifier,
            address,
            verdicts: Mutex::default(),
            opened: Mutex::default(),
            connections: Mutex::default(),
            at_once: Semaphore::new((processors / 2).max(1)),
            effort: Default::default(),
        }))
    }

    /// Demands that `token` grants `right` on `resource` now.
    ///
    /// # Errors
    /// `TokenInvalid`, `TokenExpired`, `RightMissing`.
    pub fn require(&self, token: &Token, resource: Resource, right: Right) -> Result<()> {
        self.0.require((Arc::new(token.clone()), resource, right))
    }

    /// Checks what a request from `peer` needs, in its turn, so that [`Self::require`] knows the
    /// answers: all of them, or up to the first refusal. Refusals slow the checks of a connection.
    pub(crate) async fn prepare(&self, peer: &str, needs: Vec<Need>) {
        self.in_turn(peer, needs, Refusals::Count).await;
    }

    /// Checks many things which a token need not grant.
    pub(crate) async fn prepare_all(&self, peer: &str, needs: Vec<Need>) {
        self.in_turn(peer, needs, Refusals::Pass).await;
    }

    /// Whether every answer is remembered, so that nothing needs to be prepared.
    pub(crate) fn knows<'a>(&self, needs: impl IntoIterator<Item = &'a Need>) -> bool {
        let now = clock::now();
        let verdicts = self.0.verdicts();
        let is_fresh = |need| {
            let found: Option<&(Time, Result<()>)> = verdicts.get(need);
            found.is_some_and(|(checked, _)| now.ms_since(*checked) < MEMORY_MS)
        };
        needs.into_iter().all(is_fresh)
    }

    /// How much work was done so far.
    pub fn effort(&self) -> Effort {
        let (opened, evaluated) = &self.0.effort;
        Effort {
            opened: opened.load(Ordering::Relaxed),
            evaluated: evaluated.load(Ordering::Relaxed),
        }
    }

    /// Makes checks for a connection, when it is its turn.
    async fn in_turn(&self, peer: &str, needs: Vec<Need>, refusals: Refusals) {
        let connection = self.0.connection(peer);
        let _turn = connection.turn.lock().await;
        let pause = self.0.pause(peer);
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        let mut left = needs.into_iter();
        while left.len() > 0 {
            let some: Vec<_> = left.by_ref().take(CHECKS_AT_ONCE).collect();
            let Ok(permit) = self.0.at_once.acquire().await else {
                return;
            };
            let checks = self.0.clone();
            let work = move || {
                some.into_iter()
                    .any(|need| checks.is_refused(need, refusals))
            };
            let is_over = tokio::task::spawn_blocking(work).await;
            drop(permit);
            if is_over.unwrap_or(true) {
                self.0.refused(peer);
                return;
            }
        }
    }
}

/// What a refusal is in a row of checks.
#[derive(Debug, Clone, Copy)]
enum Refusals {
    /// The end of it, which slows the connection.
    Count,
    /// An answer like another.
    Pass,
}

impl Checks {
    fn require(&self, need: Need) -> Result<()> {
        let now = clock::now();
        let mut verdicts = self.verdicts();
        if let Some((checked, verdict)) = verdicts.get(&need)
            && now.ms_since(*checked) < MEMORY_MS
        {
            return verdict.clone();
        }
        verdicts.remove(&need);
        drop(verdicts);
        let (token, resource, right) = &need;
        let verdict = self.open(token).and_then(|token| {
            self.effort.1.fetch_add(1, Ordering::Relaxed);
            token.verify(self.address.as_deref(), resource, *right, now)
        });
        let mut verdicts = self.verdicts();
        if verdicts.len() >= VERDICTS_MAX {
            verdicts.clear();
        }
        verdicts.insert(need, (now, verdict.clone()));
        verdict
    }

    fn is_refused(&self, need: Need, refusals: Refusals) -> bool {
        self.require(need).is_err() && matches!(refusals, Refusals::Count)
    }

    fn open(&self, token: &Token) -> Result<OpenToken> {
        let opened = || self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = opened().get(token) {
            return Ok(open.clone());
        }
        self.effort.0.fetch_add(1, Ordering::Relaxed);
        let open = self.verifier.open(token)?;
        let mut opened = opened();
        if opened.len() >= TOKENS_MAX {
            opened.clear();
        }
        opened.insert(token.clone(), open.clone());
        Ok(open)
    }

    fn connection(&self, peer: &str) -> Connection {
        let now = clock::now();
        let mut connections = self.connections();
        if let Some(known) = connections.get(peer) {
            return known.clone();
        }
        if connections.len() >= CONNECTIONS_MAX {
            connections.retain(|_, it| Arc::strong_count(&it.turn) > 1 || it.is_held(now));
        }
        if connections.len() >= CONNECTIONS_MAX {
            let oldest = connections.iter().min_by_key(|(_, it)| it.last);
            let oldest = oldest.map(|(peer, _)| peer.clone());
            oldest.map(|peer| connections.remove(&peer));
        }
        let fresh = Connection {
            turn: Arc::default(),
            refusals: 0,
            last: now,
        };
        connections.insert(peer.to_owned(), fresh.clone());
        fresh
    }

    fn refused(&self, peer: &str) {
        let now = clock::now();
        if let Some(connection) = self.connections().get_mut(peer) {
            let before = if connection.is_held(now) {
                connection.refusals
            } else {
                0
            };
            connection.refusals = before.saturating_add(1);
            connection.last = now;
            if connection.refusals == REFUSALS_FREE + 1 {
                tracing::warn!(peer, "refused again and again: its calls are slowed");
            }
        }
    }

    /// How long a connection waits for its next check.
    fn pause(&self, peer: &str) -> Duration {
        let now = clock::now();
        let connections = self.connections();
        let held = connections.get(peer).filter(|it| it.is_held(now));
        let over = held.map_or(0, |it| it.refusals.saturating_sub(REFUSALS_FREE));
        REFUSAL_PAUSE.saturating_mul(over).min(REFUSAL_PAUSE_MAX)
    }

    fn verdicts(&self) -> MutexGuard<'_, BTreeMap<Need, (Time, Result<()>)>> {
        self.verdicts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<String, Connection>> {
        let connections = self.connections.lock();
        connections.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connection {
    /// Whether its refusals still count.
    fn is_held(&self, now: Time) -> bool {
        self.refusals > 0 && now.ms_since(self.last) < REFUSALS_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::ErrorCode;
    use bafs_proto::ids::VolumeId;
    use bafs_proto::token::Signer;

    fn of_jobs() -> (Access, Token) {
        let signer = Signer::generate();
        let expires = clock::now().plus_ms(60_000);
        let token = signer.grant(&[Resource::Jobs], &[Right::Read], expires);
        (Access::new(signer.verifier()), token.expect("grant"))
    }

    #[test]
    fn a_remembered_answer_is_for_that_question_only() {
        let (access, token) = of_jobs();
        for _ in 0..2 {
            assert!(access.require(&token, Resource::Jobs, Right::Read).is_ok());
            assert!(
                access
                    .require(&token, Resource::Jobs, Right::Manage)
                    .is_err()
            );
            assert!(
                access
                    .require(&token, Resource::Catalog, Right::Read)
                    .is_err()
            );
        }
    }

    #[test]
    fn a_refusal_costs_no_more_than_a_grant() {
        let (access, token) = of_jobs();
        access
            .require(&token, Resource::Jobs, Right::Read)
            .expect("granted");
        let served = access.effort();
        assert_eq!((served.opened, served.evaluated), (1, 1));
        for id in 0..5 {
            let volume = Resource::Volume(VolumeId(id));
            for _ in 0..3 {
                let refused = access.require(&token, volume.clone(), Right::Read);
                assert_eq!(refused.expect_err("no right").code, ErrorCode::RightMissing);
            }
        }
        let refused = access.effort();
        assert_eq!((refused.opened, refused.evaluated), (1, 6));
        let foreign = Token::from_bytes(vec![7; 300]);
        let asked = access.require(&foreign, Resource::Jobs, Right::Read);
        assert!(asked.is_err());
        assert_eq!(access.effort().evaluated, 6);
    }

    #[tokio::test]
    async fn refusals_slow_their_connection_and_no_other() {
        let (access, token) = of_jobs();
        let token = Arc::new(token);
        let need = |id| vec![(token.clone(), Resource::Volume(VolumeId(id)), Right::Read)];
        for id in 0..u128::from(REFUSALS_FREE) {
            access.prepare("a:1", need(id)).await;
        }
        assert_eq!(access.0.pause("a:1"), Duration::ZERO);
        access.prepare("a:1", need(100)).await;
        assert_eq!(access.0.pause("a:1"), REFUSAL_PAUSE);
        (0..120).for_each(|_| access.0.refused("a:1"));
        assert!(access.0.pause("a:1") > Duration::from_secs(1));
        access.prepare("b:1", need(300)).await;
        assert_eq!(access.0.pause("b:1"), Duration::ZERO);
        assert!(access.knows(&need(300)));
        assert!(!access.knows(&need(301)));
    }
}
