//! Capability tokens: who holds one may use the rights in it until a time.
//!
//! A token grants [`Right`]s on [`Resource`]s. Each resource has a text form, such as `volume/ID/`
//! or `home/path/`. A grant covers every resource whose text begins with its own text. So a grant
//! on the empty text ([`Resource::Cluster`]) covers everything.
//!
//! * [`Signer`] has the secret key (Ed25519) of the cluster. It signs the first block, which
//!   contains the grants and the expiry.
//! * [`Verifier`] has the public key, and every process has one. It checks tokens. It also narrows
//!   them: it appends a block with a check, and asks nobody. The new token grants what the old one
//!   and the check both allow.
//! * [`OpenToken`] is a token whose signatures were checked. Signatures are most of the work, so
//!   servers keep open tokens and evaluate them for many requests.
//!
//! A check names rights, resources, an expiry, and if wanted one server by its address. Another
//! server rejects a token that is narrowed to one server.
//!
//! **Errors.** `TokenInvalid`: no token, not signed by this cluster, too large, or extended by
//! another program than BAFS. `TokenExpired`: its time is over. `RightMissing`: it does not grant
//! this. All three are of the class `Denied`, so callers do not repeat the call.
//!
//! **Limits.** A token has at most 8 KiB and nine blocks. Whoever holds a token can append blocks
//! of any content, and some checks take hours to evaluate. So a verifier accepts only the forms of
//! checks that this file writes.
//!
//! Nothing here has state or reads a clock: callers pass the time. This file is the only user of
//! `biscuit-auth`, which implements the Biscuit format (biscuitsec.org). The choice is recorded in
//! `docs/decisions/0003-capability-tokens.md`.

use std::collections::BTreeSet;
use std::fmt;

use biscuit_auth::builder::{
    Algorithm, AuthorizerBuilder, Binary, BlockBuilder, Check, CheckKind, Expression, Op, Rule,
    Term, Unary,
};
use biscuit_auth::{AuthorizerLimits, Biscuit, KeyPair, PrivateKey, PublicKey, UnverifiedBiscuit};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorCode, Result};
use crate::ids::{RunId, VolumeId};
use crate::limits::{TOKEN_BLOCKS_MAX, TOKEN_BYTES_MAX};
use crate::time::Time;

/// A right that a token grants on a resource. No right includes another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Right {
    /// Read data and attributes.
    Read,
    /// Change data and attributes.
    Write,
    /// Create, delete, list, extract, replicate; start and kill jobs.
    Manage,
}

impl Right {
    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Manage => "manage",
        }
    }
}

/// What the text form of all workflows of a queue is.
const QUEUE_PREFIX: &str = "queue/";

/// The object of a right. A grant on a resource covers everything whose text begins with its text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// Everything in the cluster.
    Cluster,
    /// One volume.
    Volume(VolumeId),
    /// Every volume of one run, whose ids begin with the run's.
    RunVolumes(RunId),
    /// Every volume.
    Volumes,
    /// The cooperative cache of this name, as its peers share it; the empty name means all.
    Cooperative(String),
    /// A path of a home server and everything below it.
    Home(String),
    /// The jobs of a node.
    Jobs,
    /// The list of servers.
    Catalog,
    /// The workflows of a user in the queue of a service, `USER` or `USER/GENERATION`; the empty
    /// name means all.
    Queue(String),
}

impl Resource {
    /// Text form; every resource starts with the cluster's empty prefix, and a home path ends
    /// with a slash so that `a` does not cover `ab`.
    fn text(&self) -> String {
        match self {
            Self::Cluster => String::new(),
            Self::Volume(id) => format!("volume/{id}/"),
            Self::RunVolumes(run) => format!("volume/{run}"),
            Self::Volumes => "volume/".to_owned(),
            Self::Cooperative(name) if name.is_empty() => "cooperative/".to_owned(),
            Self::Cooperative(name) => format!("cooperative/{name}/"),
            Self::Home(path) if path.is_empty() => "home/".to_owned(),
            Self::Home(path) => format!("home/{path}/"),
            Self::Jobs => "jobs/".to_owned(),
            Self::Catalog => "catalog/".to_owned(),
            Self::Queue(user) if user.is_empty() => QUEUE_PREFIX.to_owned(),
            Self::Queue(user) => format!("{QUEUE_PREFIX}{user}/"),
        }
    }
}

/// A signed capability, opaque to its bearer. `Debug` does not show it.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token(Vec<u8>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({} bytes)", self.0.len())
    }
}

impl Token {
    /// The token of a call that needs none.
    pub fn none() -> Self {
        Self::default()
    }

    /// The token from the bytes of a file.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The bytes, to keep in a file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Signs tokens; held by the cluster's authority only.
pub struct Signer(KeyPair);

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signer")
    }
}

impl Signer {
    /// A new signer with a new key.
    pub fn generate() -> Self {
        Self(KeyPair::new())
    }

    /// The signer whose key was kept as `text`.
    ///
    /// # Errors
    /// `Malformed` when the text is no key.
    pub fn from_text(text: &str) -> Result<Self> {
        PrivateKey::from_bytes_hex(text.trim(), Algorithm::Ed25519)
            .map(|key| Self(KeyPair::from(&key)))
            .map_err(|e| Error::new(ErrorCode::Malformed, format!("token key: {e}")))
    }

    /// The secret key, to keep in a file.
    pub fn to_text(&self) -> String {
        self.0.private().to_bytes_hex()
    }

    /// The verifier that belongs to it.
    pub fn verifier(&self) -> Verifier {
        Verifier(self.0.public())
    }

    /// Grants `rights` on each of `resources` until `expires`.
    ///
    /// # Errors
    /// `Malformed` when a resource name cannot be expressed.
    pub fn grant(&self, resources: &[Resource], rights: &[Right], expires: Time) -> Result<Token> {
        self.grant_per_resource(&[(resources, rights)], expires)
    }

    /// Grants, of each pair, the rights on each of the resources until `expires`.
    ///
    /// # Errors
    /// As [`Signer::grant`].
    pub fn grant_per_resource(
        &self,
        granted: &[(&[Resource], &[Right])],
        expires: Time,
    ) -> Result<Token> {
        let mut builder = Biscuit::builder();
        for (resources, rights) in granted {
            for resource in *resources {
                for right in *rights {
                    let source = format!(
                        "grant({}, {})",
                        quote(&resource.text()),
                        quote(right.name())
                    );
                    builder = builder.fact(source.as_str()).map_err(malformed)?;
                }
            }
        }
        let check = format!("check if time($t), $t < {}", expires.0);
        let token = builder
            .check(check.as_str())
            .and_then(|builder| builder.build(&self.0))
            .and_then(|token| token.to_vec())
            .map_err(malformed)?;
        Ok(Token(token))
    }
}

/// Checks tokens; every process has one.
#[derive(Debug, Clone)]
pub struct Verifier(PublicKey);

impl Verifier {
    /// The verifier whose public key was kept as `text`.
    ///
    /// # Errors
    /// `Malformed` when the text is no key.
    pub fn from_text(text: &str) -> Result<Self> {
        PublicKey::from_bytes_hex(text.trim(), Algorithm::Ed25519)
            .map(Self)
            .map_err(|e| Error::new(ErrorCode::Malformed, format!("token key: {e}")))
    }

    /// The public key, to keep in a file.
    pub fn to_text(&self) -> String {
        self.0.to_bytes_hex()
    }

    /// Narrows a token: the result grants at most `rights` on `resources` until `expires`.
    ///
    /// # Errors
    /// `TokenInvalid` when the token is not of this cluster.
    pub fn narrow(
        &self,
        token: &Token,
        resources: &[Resource],
        rights: &[Right],
        expires: Time,
    ) -> Result<Token> {
        self.narrow_per_resource(token, &[(resources, rights)], expires)
    }

    /// Narrows a token: the result grants at most, of each pair, the rights on the resources, until
    /// `expires`.
    ///
    /// # Errors
    /// As [`Verifier::narrow`].
    pub fn narrow_per_resource(
        &self,
        token: &Token,
        granted: &[(&[Resource], &[Right])],
        expires: Time,
    ) -> Result<Token> {
        self.append_check(token, granted, expires, None)
    }

    /// As [`Verifier::narrow`], and only the server that others reach at the address `server`
    /// believes the result: whoever sees it there cannot use it anywhere else.
    ///
    /// # Errors
    /// As [`Verifier::narrow`].
    pub fn narrow_for_server(
        &self,
        token: &Token,
        server: &str,
        resources: &[Resource],
        rights: &[Right],
        expires: Time,
    ) -> Result<Token> {
        self.append_check(token, &[(resources, rights)], expires, Some(server))
    }

    fn append_check(
        &self,
        token: &Token,
        granted: &[(&[Resource], &[Right])],
        expires: Time,
        server: Option<&str>,
    ) -> Result<Token> {
        let one = |(resources, rights): &(&[Resource], &[Right])| {
            let names: Vec<_> = rights.iter().map(|r| quote(r.name())).collect();
            let prefixes: Vec<_> = resources
                .iter()
                .map(|r| format!("$r.starts_with({})", quote(&r.text())))
                .collect();
            let (names, prefixes) = (names.join(", "), prefixes.join(" || "));
            format!("({{{names}}}.contains($o) && ({prefixes}))")
        };
        let pairs: Vec<_> = granted.iter().map(one).collect();
        let place = server.map(|server| format!("server({}), ", quote(server)));
        let check = format!(
            "check if resource($r), operation($o), time($t), {}$t < {}, {}",
            place.unwrap_or_default(),
            expires.0,
            pairs.join(" || ")
        );
        let parsed = self.parse(token)?;
        if parsed.block_count() >= TOKEN_BLOCKS_MAX {
            let text = format!(
                "the token was restricted {} times, which is the maximum; grant from its original \
                 identity",
                TOKEN_BLOCKS_MAX - 1
            );
            return Err(Error::new(ErrorCode::TokenInvalid, text));
        }
        let block = BlockBuilder::new().check(check.as_str());
        let bytes = parsed
            .append(block.map_err(malformed)?)
            .and_then(|token| token.to_vec())
            .map_err(malformed)?;
        if bytes.len() > TOKEN_BYTES_MAX {
            let text = "a token cannot name so many resources; create several tokens";
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        Ok(Token(bytes))
    }

    /// When a token is good for nothing any more; `None` if that is never.
    ///
    /// # Errors
    /// As [`Verifier::open`].
    pub fn expiry_of(&self, token: &Token) -> Result<Option<Time>> {
        let facts = AuthorizerBuilder::new().build(&self.parse(token)?);
        let authorizer = facts.map_err(malformed)?;
        let (_, _, checks, _) = authorizer.dump();
        let earliest = earliest_expiry(&checks).map(|end| Time(u64::try_from(end).unwrap_or(0)));
        Ok(earliest)
    }

    /// Checks that `token` grants `right` on `resource` at the time `now`, to somebody who is no
    /// server with an address.
    ///
    /// # Errors
    /// `TokenInvalid`, `TokenExpired` or `RightMissing`, with the resource named.
    pub fn verify(
        &self,
        token: &Token,
        resource: &Resource,
        right: Right,
        now: Time,
    ) -> Result<()> {
        self.verify_for_server(token, None, resource, right, now)
    }

    /// As [`Verifier::verify`], by the server that others reach at `server`.
    ///
    /// # Errors
    /// As [`Verifier::verify`].
    pub fn verify_for_server(
        &self,
        token: &Token,
        server: Option<&str>,
        resource: &Resource,
        right: Right,
        now: Time,
    ) -> Result<()> {
        self.open(token)?.verify(server, resource, right, now)
    }

    /// Checks the signatures of a token, which is most of the work; what it grants may then be
    /// asked many times.
    ///
    /// # Errors
    /// `TokenInvalid`.
    pub fn open(&self, token: &Token) -> Result<OpenToken> {
        self.parse(token).map(OpenToken)
    }

    fn parse(&self, token: &Token) -> Result<Biscuit> {
        let invalid = |why: String| Error::new(ErrorCode::TokenInvalid, why);
        if token.0.is_empty() {
            return Err(invalid("the call needs a token, but has none".to_owned()));
        }
        if token.0.len() > TOKEN_BYTES_MAX {
            return Err(invalid("the token is too large".to_owned()));
        }
        let foreign = |e| invalid(format!("the token is not signed by this cluster: {e}"));
        let unverified = UnverifiedBiscuit::from(&token.0).map_err(foreign)?;
        // Before any signature: whoever holds a token chooses how many blocks it has.
        if unverified.block_count() > TOKEN_BLOCKS_MAX {
            let text = format!(
                "the token has {} blocks; at most {TOKEN_BLOCKS_MAX} are read",
                unverified.block_count()
            );
            return Err(invalid(text));
        }
        if unverified
            .external_public_keys()
            .iter()
            .any(Option::is_some)
        {
            return Err(invalid(FOREIGN_CHECK_MESSAGE.to_owned()));
        }
        unverified.verify(self.0).map_err(|e| foreign(e.into()))
    }
}

/// A token of this cluster whose signatures were checked.
#[derive(Debug, Clone)]
pub struct OpenToken(Biscuit);

impl OpenToken {
    /// Checks that the token grants `right` on `resource` at the time `now` by the server that
    /// others reach at `server`. Evaluates it once at most, whatever the answer is.
    ///
    /// # Errors
    /// As [`Verifier::verify`].
    pub fn verify(
        &self,
        server: Option<&str>,
        resource: &Resource,
        right: Right,
        now: Time,
    ) -> Result<()> {
        let place = server.map(|server| format!("server({}); ", quote(server)));
        let facts = format!(
            "{}resource({}); operation({}); time({}); \
             allow if grant($p, $o), operation($o), resource($r), $r.starts_with($p);",
            place.unwrap_or_default(),
            quote(&resource.text()),
            quote(right.name()),
            now.0
        );
        // The library's default of 1 ms is shorter than a pre-emption on a busy machine.
        let limits = AuthorizerLimits {
            max_time: std::time::Duration::from_secs(1),
            ..AuthorizerLimits::default()
        };
        let wanted = || format!("'{}' on '{}'", right.name(), resource.text());
        let missing = || {
            let text = format!("the token does not grant {}", wanted());
            Error::new(ErrorCode::RightMissing, text)
        };
        let built = AuthorizerBuilder::new()
            .set_limits(limits)
            .code(facts)
            .and_then(|builder| builder.build(&self.0));
        let mut authorizer = built.map_err(|_| missing())?;
        let (facts, rules, checks, _) = authorizer.dump();
        let granted = facts.iter().filter(|fact| fact.predicate.name == "grant");
        let asked = facts.len() - granted.count();
        let is_ours = rules.is_empty() && asked == 3 + usize::from(server.is_some());
        if !is_ours || !checks.iter().all(is_own_check) {
            return Err(Error::new(ErrorCode::TokenInvalid, FOREIGN_CHECK_MESSAGE));
        }
        if earliest_expiry(&checks)
            .is_some_and(|end| i64::try_from(now.0).is_ok_and(|now| now >= end))
        {
            let text = format!(
                "the token for {} has expired: here it is {}. Is the clock of the machine that \
                 shows it right? Compare `date -u` on both; if they agree, get a new token",
                wanted(),
                now.to_utc_text()
            );
            return Err(Error::new(ErrorCode::TokenExpired, text));
        }
        authorizer.authorize().map(drop).map_err(|_| missing())
    }
}

impl OpenToken {
    /// The user of a service for whom the token is used: its grants or checks name workflows of
    /// this user, and of no other one. It proves no right.
    pub fn queue_user(&self) -> Option<String> {
        let authorizer = AuthorizerBuilder::new().build(&self.0).ok()?;
        let (facts, _, checks, _) = authorizer.dump();
        let mut users = BTreeSet::new();
        for fact in &facts {
            fact.predicate
                .terms
                .iter()
                .for_each(|term| note_user(term, &mut users));
        }
        let queries = checks.iter().flat_map(|check| &check.queries);
        for expression in queries.flat_map(|query| &query.expressions) {
            expression
                .ops
                .iter()
                .for_each(|op| note_users(op, &mut users));
        }
        let user = users.pop_first()?;
        users.is_empty().then_some(user)
    }
}

/// Adds the users whose workflows a step of a check names.
fn note_users(op: &Op, users: &mut BTreeSet<String>) {
    match op {
        Op::Value(term) => note_user(term, users),
        Op::Closure(_, ops) => ops.iter().for_each(|op| note_users(op, users)),
        Op::Unary(_) | Op::Binary(_) => {}
    }
}

/// Adds the user whose workflows a resource names, by its text form.
fn note_user(term: &Term, users: &mut BTreeSet<String>) {
    if let Term::Str(text) = term
        && let Some(rest) = text.strip_prefix(QUEUE_PREFIX)
        && let Some((user, _)) = rest.split_once('/')
    {
        users.insert(user.to_owned());
    }
}

/// Why a token is refused that has more than [`Signer`] and [`Verifier`] write.
const FOREIGN_CHECK_MESSAGE: &str = "another program than BAFS restricted the token";

/// What a check may ask for: there is one of each, so that a check has one combination to look at.
const REQUEST_FACTS: [&str; 4] = ["resource", "operation", "time", "server"];

/// Whether a check is one that [`Signer`] or [`Verifier`] writes. Whoever holds a token may append
/// what they like to it, and the library minds its time between the steps of an evaluation only:
/// five facts joined with themselves take it hours.
fn is_own_check(check: &Check) -> bool {
    check.kind == CheckKind::One && check.queries.iter().all(is_own_query)
}

/// The first time at which one of the checks fails, whatever is asked.
fn earliest_expiry(checks: &[Check]) -> Option<i64> {
    let end = |query: &Rule| query.expressions.iter().filter_map(time_bound).min();
    let ends = checks.iter().filter_map(|check| {
        let ends: Option<Vec<_>> = check.queries.iter().map(end).collect();
        ends?.into_iter().max()
    });
    ends.min()
}

/// The number in `$t < number`, which only the time is compared with.
fn time_bound(expression: &Expression) -> Option<i64> {
    match expression.ops.as_slice() {
        [
            Op::Value(Term::Variable(_)),
            Op::Value(Term::Integer(end)),
            Op::Binary(Binary::LessThan),
        ] => Some(*end),
        _ => None,
    }
}

fn is_own_query(query: &Rule) -> bool {
    let mut left = REQUEST_FACTS.to_vec();
    let mut is_new = |name: &str| {
        let at = left.iter().position(|asked| *asked == name);
        at.map(|at| left.swap_remove(at)).is_some()
    };
    let mut expressions = query.expressions.iter();
    query.body.iter().all(|predicate| is_new(&predicate.name))
        && expressions.all(|expression| expression.ops.iter().all(is_own_op))
}

/// Neither patterns nor loops, which take long to evaluate.
fn is_own_op(op: &Op) -> bool {
    match op {
        Op::Value(_) => true,
        Op::Unary(unary) => matches!(unary, Unary::Parens),
        Op::Binary(binary) => matches!(
            binary,
            Binary::LessThan
                | Binary::Contains
                | Binary::Prefix
                | Binary::And
                | Binary::Or
                | Binary::LazyAnd
                | Binary::LazyOr
        ),
        Op::Closure(parameters, ops) => parameters.is_empty() && ops.iter().all(is_own_op),
    }
}

fn quote(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

fn malformed(error: biscuit_auth::error::Token) -> Error {
    Error::new(ErrorCode::Malformed, format!("token: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Time = Time(1_000);

    fn code(result: Result<()>) -> Option<ErrorCode> {
        result.err().map(|e| e.code)
    }

    #[test]
    fn queue_token_names_one_generation_of_a_user() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let queue = |user: &str| Resource::Queue(user.to_owned());
        let granted: [(&[Resource], &[Right]); 2] = [
            (&[queue("al/3")], &[Right::Write]),
            (&[queue("")], &[Right::Read]),
        ];
        let token = signer.grant_per_resource(&granted, DAY).expect("grant");
        let all = [Right::Read, Right::Write, Right::Manage];
        let shown = verifier.narrow(&token, &[queue("")], &all, DAY);
        let shown = shown.expect("it is narrowed for a call");
        let verify =
            |user: &str, right| code(verifier.verify(&shown, &queue(user), right, Time(5)));
        assert_eq!(verify("al/3", Right::Write), None);
        assert_eq!(verify("", Right::Read), None);
        for (user, right) in [
            ("al/4", Right::Write),
            ("al/31", Right::Write),
            ("alice/3", Right::Write),
            ("", Right::Manage),
            ("", Right::Write),
        ] {
            assert_eq!(verify(user, right), Some(ErrorCode::RightMissing), "{user}");
        }
    }

    #[test]
    fn token_names_the_user_of_a_queue() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let user = |token: &Token| verifier.open(token).expect("it is ours").queue_user();
        let (read, write): (&[Right], &[Right]) = (&[Right::Read], &[Right::Write]);
        let queue = |name: &str| [Resource::Queue(name.to_owned())];
        let home = [Resource::Home("a".to_owned())];
        let (own, all) = (queue("al/3"), queue(""));
        let granted = signer.grant_per_resource(&[(&own, write), (&all, read)], DAY);
        assert_eq!(user(&granted.expect("grant")), Some("al".to_owned()));
        let whole = signer
            .grant(&[Resource::Cluster], read, DAY)
            .expect("grant");
        assert_eq!(user(&whole), None);
        // As a service narrows its own token for the runs of a user, and those for a call.
        let narrow = verifier.narrow_per_resource(&whole, &[(&home, read), (&own, write)], DAY);
        let narrow = narrow.expect("narrow");
        let call = verifier.narrow(&narrow, &home, read, DAY).expect("narrow");
        assert_eq!(user(&call), Some("al".to_owned()));
        assert_eq!(
            verifier.verify(&call, &home[0], Right::Read, Time(5)),
            Ok(())
        );
        let two = verifier
            .narrow(&call, &queue("bob/1"), read, DAY)
            .expect("narrow");
        assert_eq!(user(&two), None, "nobody uses what is another user's");
    }

    #[test]
    fn a_token_grants_exactly_its_stated_rights() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let one = Resource::Volume(VolumeId(1));
        let token = signer
            .grant(std::slice::from_ref(&one), &[Right::Read], DAY)
            .expect("grant");
        assert_eq!(verifier.verify(&token, &one, Right::Read, Time(5)), Ok(()));
        let missing = Some(ErrorCode::RightMissing);
        assert_eq!(
            code(verifier.verify(&token, &one, Right::Write, Time(5))),
            missing
        );
        let two = Resource::Volume(VolumeId(2));
        assert_eq!(
            code(verifier.verify(&token, &two, Right::Read, Time(5))),
            missing
        );
        let late = verifier.verify(&token, &one, Right::Read, Time(1_000));
        let told = late.clone().expect_err("it is late").detail;
        for part in ["1970-01-01 00:00:01 UTC", "clock", "`date -u` on both"] {
            assert!(told.contains(part), "{told}");
        }
        assert_eq!(code(late), Some(ErrorCode::TokenExpired));
    }

    #[test]
    fn a_narrowed_token_never_grants_more() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let all = signer
            .grant(
                &[Resource::Cluster],
                &[Right::Read, Right::Write, Right::Manage],
                DAY,
            )
            .expect("grant");
        let home = Resource::Home("a".to_owned());
        let narrow = verifier
            .narrow(&all, &[home, Resource::Jobs], &[Right::Read], Time(500))
            .expect("narrow");
        let inside = Resource::Home("a/b".to_owned());
        let beside = Resource::Home("ab".to_owned());
        assert_eq!(
            verifier.verify(&all, &beside, Right::Write, Time(5)),
            Ok(())
        );
        assert_eq!(
            verifier.verify(&narrow, &inside, Right::Read, Time(5)),
            Ok(())
        );
        assert_eq!(
            verifier.verify(&narrow, &Resource::Jobs, Right::Read, Time(5)),
            Ok(())
        );
        for (resource, right) in [(&beside, Right::Read), (&inside, Right::Write)] {
            assert!(verifier.verify(&narrow, resource, right, Time(5)).is_err());
        }
        let wider = verifier
            .narrow(&narrow, &[Resource::Cluster], &[Right::Write], DAY)
            .expect("narrow");
        assert!(
            verifier
                .verify(&wider, &inside, Right::Write, Time(5))
                .is_err()
        );
        assert!(
            verifier
                .verify(&narrow, &inside, Right::Read, Time(600))
                .is_err()
        );
    }

    #[test]
    fn narrowing_can_differ_for_each_resource() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let all = signer
            .grant(&[Resource::Cluster], &[Right::Read, Right::Write], DAY)
            .expect("grant");
        let volumes = [1, 2].map(|id| Resource::Volume(VolumeId(id)));
        let narrow = verifier
            .narrow_per_resource(
                &all,
                &[
                    (&[Resource::Catalog], &[Right::Read]),
                    (&volumes, &[Right::Read, Right::Write]),
                ],
                DAY,
            )
            .expect("narrow");
        let other = Resource::Volume(VolumeId(3));
        for (resource, right, is_granted) in [
            (&Resource::Catalog, Right::Read, true),
            (&Resource::Catalog, Right::Write, false),
            (&volumes[0], Right::Write, true),
            (&volumes[1], Right::Read, true),
            (&volumes[1], Right::Manage, false),
            (&other, Right::Read, false),
        ] {
            let verdict = verifier.verify(&narrow, resource, right, Time(5));
            assert_eq!(verdict.is_ok(), is_granted, "{resource:?} {right:?}");
        }
        let late = verifier.verify(&narrow, &volumes[0], Right::Read, DAY);
        assert_eq!(code(late), Some(ErrorCode::TokenExpired));
    }

    #[test]
    fn a_token_for_one_server_fails_elsewhere() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let all = signer
            .grant(&[Resource::Cluster], &[Right::Read, Right::Manage], DAY)
            .expect("grant");
        let (jobs, expires) = ([Resource::Jobs], Time(500));
        let shown = verifier
            .narrow_for_server(&all, "a:1", &jobs, &[Right::Manage], expires)
            .expect("narrow");
        let ask = |token: &Token, server, right| {
            code(verifier.verify_for_server(token, server, &Resource::Jobs, right, Time(5)))
        };
        let missing = Some(ErrorCode::RightMissing);
        assert_eq!(ask(&shown, Some("a:1"), Right::Manage), None);
        assert_eq!(ask(&shown, Some("a:1"), Right::Read), missing);
        assert_eq!(ask(&shown, Some("b:1"), Right::Manage), missing);
        assert_eq!(ask(&shown, None, Right::Manage), missing);
        assert_eq!(ask(&all, Some("b:1"), Right::Manage), None);
        // Narrowing it again, for the other server, does not help.
        let again = verifier
            .narrow_for_server(&shown, "b:1", &jobs, &[Right::Manage], expires)
            .expect("narrow");
        for server in [Some("a:1"), Some("b:1"), None] {
            assert_eq!(ask(&again, server, Right::Manage), missing);
        }
    }

    #[test]
    fn run_tokens_cover_only_the_runs_volumes() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let token = signer
            .grant(&[Resource::RunVolumes(RunId(7))], &[Right::Manage], DAY)
            .expect("grant");
        for (run, is_granted) in [(7, true), (8, false), (0x70, false)] {
            let volume = Resource::Volume(VolumeId(RunId(run).derive(3)));
            let verdict = verifier.verify(&token, &volume, Right::Manage, Time(5));
            assert_eq!(verdict.is_ok(), is_granted, "run {run:x}");
        }
    }

    #[test]
    fn foreign_and_malformed_tokens_are_refused() {
        let token = Signer::generate()
            .grant(&[Resource::Cluster], &[Right::Read], DAY)
            .expect("grant");
        let verifier = Signer::generate().verifier();
        let invalid = Some(ErrorCode::TokenInvalid);
        let ask = |t: &Token| code(verifier.verify(t, &Resource::Jobs, Right::Read, Time(1)));
        assert_eq!(ask(&token), invalid);
        assert_eq!(ask(&Token::none()), invalid);
        assert_eq!(ask(&Token::from_bytes(vec![7; 300])), invalid);
    }

    /// What somebody appended who holds a token, with the library alone.
    fn append_source(token: &Token, key: &Verifier, source: &str) -> Token {
        let parsed = Biscuit::from(token.as_bytes(), key.0).expect("a token");
        let block = BlockBuilder::new().code(source).expect("a block");
        let appended = parsed.append(block).expect("appended");
        Token::from_bytes(appended.to_vec().expect("bytes"))
    }

    fn with_blocks(verifier: &Verifier, token: &Token, blocks: usize) -> Token {
        let more = |token: Token, _| append_source(&token, verifier, "check if time($t), $t < 900");
        (1..blocks).fold(token.clone(), more)
    }

    #[test]
    fn blocks_are_bounded_before_signatures_are_checked() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let jobs = [Resource::Jobs];
        let token = signer.grant(&jobs, &[Right::Manage], DAY).expect("grant");
        let most = with_blocks(&verifier, &token, TOKEN_BLOCKS_MAX);
        let ask = |verifier: &Verifier, token: &Token| {
            verifier.verify(token, &Resource::Jobs, Right::Manage, Time(1))
        };
        assert_eq!(ask(&verifier, &most), Ok(()));
        let more = with_blocks(&verifier, &token, TOKEN_BLOCKS_MAX + 1);
        // Who knows another key finds no signature good, and does not come so far.
        for verifier in [&verifier, &Signer::generate().verifier()] {
            let refused = ask(verifier, &more).expect_err("too many blocks");
            assert_eq!(refused.code, ErrorCode::TokenInvalid);
            assert!(refused.detail.contains("at most 9 are read"), "{refused}");
        }
        let narrowed = verifier.narrow(&most, &jobs, &[Right::Manage], DAY);
        let refused = narrowed.expect_err("nobody would read it");
        assert!(refused.detail.contains("restricted 8 times"), "{refused}");
    }

    #[test]
    fn a_token_expires_with_its_shortest_narrowing() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let jobs = [Resource::Jobs];
        let token = signer.grant(&jobs, &[Right::Read], DAY).expect("grant");
        assert_eq!(verifier.expiry_of(&token), Ok(Some(DAY)));
        for (until, expires) in [(500, 500), (5_000, 1_000), (u64::MAX >> 1, 1_000)] {
            let narrow = verifier.narrow(&token, &jobs, &[Right::Read], Time(until));
            let narrow = narrow.expect("narrow");
            assert_eq!(verifier.expiry_of(&narrow), Ok(Some(Time(expires))));
            let ask = |now| code(verifier.verify(&narrow, &Resource::Jobs, Right::Read, Time(now)));
            assert_eq!(ask(expires - 1), None);
            assert_eq!(ask(expires), Some(ErrorCode::TokenExpired));
        }
        let odd = append_source(
            &token,
            &verifier,
            "check if time($t), $t < 5 or time($t), $t < 9",
        );
        assert_eq!(verifier.expiry_of(&odd), Ok(Some(Time(9))));
    }

    #[test]
    fn expensive_token_checks_are_refused() {
        let signer = Signer::generate();
        let verifier = signer.verifier();
        let token = signer
            .grant(&[Resource::Jobs], &[Right::Manage], DAY)
            .expect("grant");
        let facts = |name: &str| -> String { (0..100).map(|n| format!("{name}({n});")).collect() };
        let numbers: Vec<_> = (0..100).map(|n| n.to_string()).collect();
        let set = format!("{{{}}}", numbers.join(", "));
        let loops = (0..6).fold("false".to_owned(), |inner, depth| {
            format!("{set}.any($v{depth} -> {inner})")
        });
        for source in [
            format!(
                "{}check if f($a), f($b), f($c), f($d), f($e), f($g), $a + $b < 0",
                facts("f")
            ),
            format!(
                "{}{}{}check if resource($a), operation($b), time($c), $a === $b, $b === $c",
                facts("resource"),
                facts("operation"),
                facts("time")
            ),
            "check if grant($a, $b), grant($c, $d)".to_owned(),
            "check if time($t), time($u)".to_owned(),
            "f($t) <- time($t)".to_owned(),
            "check all time($t), $t < 100".to_owned(),
            "reject if time($t), $t < 1".to_owned(),
            "check if resource($r), $r.matches(\"((a{100}){100}){10}\")".to_owned(),
            format!("check if {loops}"),
        ] {
            let odd = append_source(&token, &verifier, &source);
            for server in [None, Some("a:1")] {
                let verdict = verifier.verify_for_server(
                    &odd,
                    server,
                    &Resource::Jobs,
                    Right::Manage,
                    Time(1),
                );
                assert_eq!(code(verdict), Some(ErrorCode::TokenInvalid), "{source}");
            }
        }
        let plain = append_source(&token, &verifier, "check if time($t), $t < 100");
        let verdict = verifier.verify(&plain, &Resource::Jobs, Right::Manage, Time(1));
        assert_eq!(verdict, Ok(()));
    }

    #[test]
    fn names_with_quotes_do_not_inject() {
        let signer = Signer::generate();
        let odd = Resource::Home("a\"), grant(\"\", \"manage".to_owned());
        let token = signer
            .grant(std::slice::from_ref(&odd), &[Right::Read], DAY)
            .expect("grant");
        let verifier = signer.verifier();
        assert_eq!(verifier.verify(&token, &odd, Right::Read, Time(1)), Ok(()));
        assert!(
            verifier
                .verify(&token, &Resource::Cluster, Right::Manage, Time(1))
                .is_err()
        );
    }

    #[test]
    fn keys_round_trip_as_text() {
        let signer = Signer::generate();
        let again = Signer::from_text(&signer.to_text()).expect("key");
        let verifier = Verifier::from_text(&signer.verifier().to_text()).expect("key");
        let token = again
            .grant(&[Resource::Jobs], &[Right::Manage], DAY)
            .expect("grant");
        assert_eq!(
            verifier.verify(&token, &Resource::Jobs, Right::Manage, Time(1)),
            Ok(())
        );
    }
}
