//! Checks the token of every request, and caches the verdicts.
//!
//! A server derives from a request which rights it needs: a token, a resource and a right each. A
//! check costs about 100 µs for the signatures, and more for the evaluation. The caller chooses the
//! token and so the cost. A caller without rights must therefore not slow others.
//!
//! 1. The server calls `check_until_refused` with the needs of a request. The check waits for the
//!    checks of the same connection. At most half of the processors check at once, on blocking
//!    threads.
//! 2. It then calls [`AccessChecker::require`] for each need. The verdicts are in the cache by
//!    then, so this costs about a microsecond.
//!
//! * A verdict is valid for five seconds, so an expired token is refused at most that much late.
//!   The cache holds 16,384 verdicts.
//! * Tokens with checked signatures are kept, up to 256. One token evaluated for many resources
//!   costs its signatures once.
//! * A connection may have 64 refusals without effect, because agents ask with tokens that have
//!   just expired. Each further one makes its next check wait 10 ms longer, 2 s at most. A minute
//!   without a refusal resets that.
//!
//! **Errors.** `TokenInvalid`, `TokenExpired`, `RightMissing`, from [`bafs_proto::token`]. They go
//! to the caller, who does not repeat the call.
//!
//! **Concurrency.** [`AccessChecker`] is shared by clones. Verdicts, open tokens and connections
//! have a mutex each, and no check runs under one of them.
//!
//! A server at a known address also accepts tokens that were narrowed to this address
//! ([`AccessChecker::with_address`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::hash::Digest;
use bafs_proto::time::Time;
use bafs_proto::token::{OpenToken, Resource, Right, Token, Verifier};
use tokio::sync::Semaphore;

use crate::clock;

/// A verdict is believed for so long; bounds how late an expiry takes effect.
const VERDICT_LIFETIME_MS: u64 = 5_000;

/// Most verdicts remembered: a signature check costs about 100 µs, a look-up about 1 µs.
const VERDICTS_MAX: usize = 16_384;

/// Most bytes of them: callers choose the names in resources, and what refusals say.
const VERDICT_BYTES_MAX: usize = 8 << 20;

/// Checks of one request that are made before others have a turn.
const CHECKS_PER_TURN: usize = 32;

/// Most tokens kept whose signatures were checked; each takes some kilobytes.
const OPEN_TOKENS_MAX: usize = 256;

/// Refusals of one connection that cost it nothing: agents ask with tokens that have just expired.
const REFUSALS_WITHOUT_PAUSE: u32 = 64;

/// Each further refusal makes the next check of the connection wait so much longer,
const REFUSAL_PAUSE: Duration = Duration::from_millis(10);

/// but not over this.
const REFUSAL_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Refusals are forgotten when a connection had none for so long, in milliseconds.
const REFUSAL_MEMORY_MS: u64 = 60_000;

/// Most connections about which something is remembered; beyond, those with the oldest refusals are
/// forgotten.
const CONNECTIONS_MAX: usize = 4096;

/// What one request needs: by which token, on what, which right.
pub(crate) type RequiredRight = (Arc<Token>, Resource, Right);

/// How much work the checks were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerificationCounts {
    /// Tokens whose signatures were checked.
    pub signatures_checked: u64,
    /// Evaluations of what a token grants.
    pub grants_evaluated: u64,
}

/// Checks capabilities against the cluster's public key. Cheap to clone.
#[derive(Debug, Clone)]
pub struct AccessChecker(Arc<AccessState>);

#[derive(Debug)]
struct AccessState {
    verifier: Verifier,
    /// Where others reach the server, for tokens that are good at one server only.
    address: Option<String>,
    verdicts: Mutex<VerdictCache>,
    open_tokens: Mutex<BTreeMap<Digest, OpenToken>>,
    /// Users of a service, by the digests of tokens.
    queue_users: Mutex<BTreeMap<Digest, String>>,
    connections: Mutex<BTreeMap<String, ConnectionRecord>>,
    /// Checks that may be under way at once.
    concurrent_checks: Semaphore,
    counts: (AtomicU64, AtomicU64),
}

/// What a verdict is about: the token by its digest, as each request brings its own copy.
type VerdictKey = (Digest, Resource, Right);

fn verdict_key((token, resource, right): &RequiredRight) -> VerdictKey {
    (token_digest(token), resource.clone(), *right)
}

fn token_digest(token: &Token) -> Digest {
    Digest::of(token.as_bytes())
}

/// Verdicts of a short while, at most so many and so many bytes.
#[derive(Debug, Default)]
struct VerdictCache {
    verdicts: BTreeMap<VerdictKey, (Time, Result<()>)>,
    bytes: usize,
}

impl VerdictCache {
    fn get(&self, key: &VerdictKey, now: Time) -> Option<&Result<()>> {
        let (checked, verdict) = self.verdicts.get(key)?;
        (now.ms_since(*checked) < VERDICT_LIFETIME_MS).then_some(verdict)
    }

    fn insert(&mut self, key: VerdictKey, now: Time, verdict: Result<()>) {
        let added = verdict_bytes(&key, &verdict);
        if !self.has_room(added) {
            // Those of others that are still good stay if that is enough.
            let is_fresh = |checked: &Time| now.ms_since(*checked) < VERDICT_LIFETIME_MS;
            self.verdicts.retain(|_, (checked, _)| is_fresh(checked));
            let left = self.verdicts.iter();
            self.bytes = left
                .map(|(key, (_, verdict))| verdict_bytes(key, verdict))
                .sum();
        }
        if !self.has_room(added) {
            *self = Self::default();
        }
        self.bytes += added;
        if let Some((_, old)) = self.verdicts.insert(key.clone(), (now, verdict)) {
            self.bytes -= verdict_bytes(&key, &old);
        }
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.verdicts.len() < VERDICTS_MAX && self.bytes + bytes <= VERDICT_BYTES_MAX
    }
}

/// The memory of a verdict, without what its map takes.
fn verdict_bytes((_, resource, _): &VerdictKey, verdict: &Result<()>) -> usize {
    let name = match resource {
        Resource::Cooperative(name) | Resource::Home(name) => name.len(),
        _ => 0,
    };
    let told = verdict.as_ref().err().map_or(0, |error| error.detail.len());
    size_of::<(VerdictKey, (Time, Result<()>))>() + name + told
}

/// What is known of one connection, by the address of its other end.
#[derive(Debug, Clone)]
struct ConnectionRecord {
    check_turn: Arc<tokio::sync::Mutex<()>>,
    refusals: u32,
    last_refusal: Time,
}

impl AccessChecker {
    /// A checker that believes tokens of this verifier's authority.
    pub fn new(verifier: Verifier) -> Self {
        Self::build(verifier, None)
    }

    /// As [`Self::new`], of a server that others reach at `address`: it also believes tokens that
    /// are for it alone.
    pub fn with_address(verifier: Verifier, address: String) -> Self {
        Self::build(verifier, Some(address))
    }

    fn build(verifier: Verifier, address: Option<String>) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        Self(Arc::new(AccessState {
            verifier,
            address,
            verdicts: Mutex::default(),
            open_tokens: Mutex::default(),
            queue_users: Mutex::default(),
            connections: Mutex::default(),
            concurrent_checks: Semaphore::new((processors / 2).max(1)),
            counts: Default::default(),
        }))
    }

    /// Demands that `token` grants `right` on `resource` now.
    ///
    /// # Errors
    /// `TokenInvalid`, `TokenExpired`, `RightMissing`.
    pub fn require(&self, token: &Token, resource: Resource, right: Right) -> Result<()> {
        self.0.require((Arc::new(token.clone()), resource, right))
    }

    /// The user of a service for whom a token is used; empty where it names none, or is not of this
    /// cluster. It proves no right.
    pub(crate) fn queue_user(&self, token: &Token) -> String {
        let digest = token_digest(token);
        if let Some(known) = self.0.queue_users().get(&digest) {
            return known.clone();
        }
        let open = self.0.open_token(token, digest);
        let user = open.ok().and_then(|open| open.queue_user());
        let user = user.unwrap_or_default();
        let mut users = self.0.queue_users();
        if users.len() >= VERDICTS_MAX {
            users.clear();
        }
        users.insert(digest, user.clone());
        user
    }

    /// Checks what a request from `peer` needs, in its turn, so that [`Self::require`] knows the
    /// answers: all of them, or up to the first refusal. Refusals slow the checks of a connection.
    pub(crate) async fn check_until_refused(&self, peer: &str, needs: Vec<RequiredRight>) {
        self.check_in_turn(peer, needs, RefusalHandling::Penalise)
            .await;
    }

    /// Checks many things which a token need not grant.
    pub(crate) async fn check_all(&self, peer: &str, needs: Vec<RequiredRight>) {
        self.check_in_turn(peer, needs, RefusalHandling::Ignore)
            .await;
    }

    /// Whether every answer is remembered, so that nothing needs to be prepared.
    pub(crate) fn has_verdicts<'a>(
        &self,
        needs: impl IntoIterator<Item = &'a RequiredRight>,
    ) -> bool {
        let now = clock::now();
        let verdicts = self.0.verdicts();
        let mut needs = needs.into_iter();
        needs.all(|need| verdicts.get(&verdict_key(need), now).is_some())
    }

    /// How much work was done so far.
    pub fn verification_counts(&self) -> VerificationCounts {
        let (opened, evaluated) = &self.0.counts;
        VerificationCounts {
            signatures_checked: opened.load(Ordering::Relaxed),
            grants_evaluated: evaluated.load(Ordering::Relaxed),
        }
    }

    /// Makes checks for a connection, when it is its turn.
    async fn check_in_turn(
        &self,
        peer: &str,
        needs: Vec<RequiredRight>,
        refusals: RefusalHandling,
    ) {
        let connection = self.0.connection(peer);
        let _turn = connection.check_turn.lock().await;
        let pause = self.0.refusal_pause(peer);
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        let mut left = needs.into_iter();
        while left.len() > 0 {
            let some: Vec<_> = left.by_ref().take(CHECKS_PER_TURN).collect();
            let Ok(permit) = self.0.concurrent_checks.acquire().await else {
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
                self.0.note_refusal(peer);
                return;
            }
        }
    }
}

/// What a refusal is in a row of checks.
#[derive(Debug, Clone, Copy)]
enum RefusalHandling {
    /// The end of it, which slows the connection.
    Penalise,
    /// An answer like another.
    Ignore,
}

impl AccessState {
    fn require(&self, need: RequiredRight) -> Result<()> {
        let now = clock::now();
        let key = verdict_key(&need);
        if let Some(verdict) = self.verdicts().get(&key, now) {
            return verdict.clone();
        }
        let (token, resource, right) = &need;
        let verdict = self.open_token(token, key.0).and_then(|token| {
            self.counts.1.fetch_add(1, Ordering::Relaxed);
            token.verify(self.address.as_deref(), resource, *right, now)
        });
        self.verdicts().insert(key, now, verdict.clone());
        verdict
    }

    fn is_refused(&self, need: RequiredRight, refusals: RefusalHandling) -> bool {
        self.require(need).is_err() && matches!(refusals, RefusalHandling::Penalise)
    }

    fn queue_users(&self) -> MutexGuard<'_, BTreeMap<Digest, String>> {
        let users = self.queue_users.lock();
        users.unwrap_or_else(PoisonError::into_inner)
    }

    fn open_token(&self, token: &Token, digest: Digest) -> Result<OpenToken> {
        let opened = || {
            self.open_tokens
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        if let Some(open) = opened().get(&digest) {
            return Ok(open.clone());
        }
        self.counts.0.fetch_add(1, Ordering::Relaxed);
        let open = self.verifier.open(token)?;
        let mut opened = opened();
        if opened.len() >= OPEN_TOKENS_MAX {
            opened.clear();
        }
        opened.insert(digest, open.clone());
        Ok(open)
    }

    fn connection(&self, peer: &str) -> ConnectionRecord {
        let now = clock::now();
        let mut connections = self.connections();
        if let Some(known) = connections.get(peer) {
            return known.clone();
        }
        if connections.len() >= CONNECTIONS_MAX {
            connections.retain(|_, it| {
                Arc::strong_count(&it.check_turn) > 1 || it.has_recent_refusals(now)
            });
        }
        if connections.len() >= CONNECTIONS_MAX {
            let oldest = connections.iter().min_by_key(|(_, it)| it.last_refusal);
            let oldest = oldest.map(|(peer, _)| peer.clone());
            oldest.map(|peer| connections.remove(&peer));
        }
        let fresh = ConnectionRecord {
            check_turn: Arc::default(),
            refusals: 0,
            last_refusal: now,
        };
        connections.insert(peer.to_owned(), fresh.clone());
        fresh
    }

    fn note_refusal(&self, peer: &str) {
        let now = clock::now();
        if let Some(connection) = self.connections().get_mut(peer) {
            let before = if connection.has_recent_refusals(now) {
                connection.refusals
            } else {
                0
            };
            connection.refusals = before.saturating_add(1);
            connection.last_refusal = now;
            if connection.refusals == REFUSALS_WITHOUT_PAUSE + 1 {
                tracing::warn!(peer, "refused again and again: its calls are slowed");
            }
        }
    }

    /// How long a connection waits for its next check.
    fn refusal_pause(&self, peer: &str) -> Duration {
        let now = clock::now();
        let connections = self.connections();
        let held = connections
            .get(peer)
            .filter(|it| it.has_recent_refusals(now));
        let over = held.map_or(0, |it| it.refusals.saturating_sub(REFUSALS_WITHOUT_PAUSE));
        REFUSAL_PAUSE.saturating_mul(over).min(REFUSAL_PAUSE_MAX)
    }

    fn verdicts(&self) -> MutexGuard<'_, VerdictCache> {
        self.verdicts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<String, ConnectionRecord>> {
        let connections = self.connections.lock();
        connections.unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionRecord {
    /// Whether its refusals still count.
    fn has_recent_refusals(&self, now: Time) -> bool {
        self.refusals > 0 && now.ms_since(self.last_refusal) < REFUSAL_MEMORY_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::ErrorCode;
    use bafs_proto::ids::VolumeId;
    use bafs_proto::token::Signer;

    fn of_jobs() -> (AccessChecker, Token) {
        let signer = Signer::generate();
        let expires = clock::now().plus_ms(60_000);
        let token = signer.grant(&[Resource::Jobs], &[Right::Read], expires);
        (AccessChecker::new(signer.verifier()), token.expect("grant"))
    }

    #[test]
    fn cached_decisions_apply_to_the_same_check_only() {
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
        let served = access.verification_counts();
        assert_eq!((served.signatures_checked, served.grants_evaluated), (1, 1));
        for id in 0..5 {
            let volume = Resource::Volume(VolumeId(id));
            for _ in 0..3 {
                let refused = access.require(&token, volume.clone(), Right::Read);
                assert_eq!(refused.expect_err("no right").code, ErrorCode::RightMissing);
            }
        }
        let refused = access.verification_counts();
        assert_eq!(
            (refused.signatures_checked, refused.grants_evaluated),
            (1, 6)
        );
        let foreign = Token::from_bytes(vec![7; 300]);
        let asked = access.require(&foreign, Resource::Jobs, Right::Read);
        assert!(asked.is_err());
        assert_eq!(access.verification_counts().grants_evaluated, 6);
    }

    #[test]
    fn remembered_verdicts_are_bounded_in_bytes() {
        let (access, token) = of_jobs();
        let now = clock::now();
        let key = |number: usize| {
            let resource = Resource::Home(format!("{number:04000}"));
            (token_digest(&token), resource, Right::Read)
        };
        let mut cache = VerdictCache::default();
        for number in 0..3 * VERDICT_BYTES_MAX / 4_000 {
            cache.insert(key(number), now, Ok(()));
            // Told again, it takes no more.
            cache.insert(key(number), now, Ok(()));
            assert!(cache.bytes <= VERDICT_BYTES_MAX && cache.get(&key(number), now).is_some());
        }
        let held = cache.verdicts.keys().map(|key| verdict_bytes(key, &Ok(())));
        assert_eq!(cache.bytes, held.sum::<usize>());
        // A copy of the token is no other token.
        let copy = Token::from_bytes(token.as_bytes().to_vec());
        assert!(access.require(&token, Resource::Jobs, Right::Read).is_ok());
        assert!(access.has_verdicts(&[(Arc::new(copy), Resource::Jobs, Right::Read)]));
        assert_eq!(access.0.verdicts().verdicts.len(), 1);
    }

    #[tokio::test]
    async fn refusals_slow_their_connection_and_no_other() {
        let (access, token) = of_jobs();
        let token = Arc::new(token);
        let need = |id| vec![(token.clone(), Resource::Volume(VolumeId(id)), Right::Read)];
        for id in 0..u128::from(REFUSALS_WITHOUT_PAUSE) {
            access.check_until_refused("a:1", need(id)).await;
        }
        assert_eq!(access.0.refusal_pause("a:1"), Duration::ZERO);
        access.check_until_refused("a:1", need(100)).await;
        assert_eq!(access.0.refusal_pause("a:1"), REFUSAL_PAUSE);
        (0..120).for_each(|_| access.0.note_refusal("a:1"));
        assert!(access.0.refusal_pause("a:1") > Duration::from_secs(1));
        access.check_until_refused("b:1", need(300)).await;
        assert_eq!(access.0.refusal_pause("b:1"), Duration::ZERO);
        assert!(access.has_verdicts(&need(300)));
        assert!(!access.has_verdicts(&need(301)));
    }
}
