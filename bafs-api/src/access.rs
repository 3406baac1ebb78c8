//! Who may use the API: bearer tokens, and sessions of browsers that a one-time link opened.
//!
//! A session needs two secrets in each call: a cookie that no script can read, and a token that the
//! page keeps and sends as a header. Browsers send cookies to all ports of a host, so that another
//! server on this machine may see the cookie; it never sees the token.
//!
//! * **Forged requests**: no other page can send the header. A change also needs the `Origin` of
//!   the page itself.
//! * **Other names of this machine**: the `Host` must be a loopback name.
//! * Secrets are compared in a time that does not depend on them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use axum::http::header::{AUTHORIZATION, COOKIE, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode};
use bafs_proto::{Error, ErrorCode};
use bafs_queue::Requester;
use rand::RngCore;

use crate::api_error::{ApiError, ApiResult};

/// The header with the token of a page.
pub(crate) const PAGE_TOKEN_HEADER: HeaderName = HeaderName::from_static("x-bafs-token");

/// What browsers say of the page that makes a request.
const FETCH_SITE_HEADER: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Sessions, links and tokens of one user at once; the oldest go first. Those of others stay.
const SECRETS_OF_USER_MAX: usize = 16;

/// 256 bits: nobody guesses them.
const SECRET_BYTES: usize = 32;

/// Names of this machine for itself.
const LOOPBACK_NAMES: [&str; 3] = ["127.0.0.1", "localhost", "[::1]"];

/// Who may use an address. Shared by all requests.
#[derive(Debug)]
pub struct Access {
    address: SocketAddr,
    grants: Mutex<Grants>,
}

#[derive(Default)]
struct Grants {
    bearers: Vec<(String, Requester)>,
    links: Vec<(String, Requester)>,
    sessions: Vec<Session>,
    /// How often the rights of a user ended.
    revocations: BTreeMap<String, u64>,
}

/// Nothing secret is shown.
impl fmt::Debug for Grants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grants({} sessions)", self.sessions.len())
    }
}

#[derive(Clone)]
struct Session {
    cookie: String,
    page_token: String,
    requester: Requester,
}

/// A link that opens the page once.
#[derive(Clone, PartialEq, Eq)]
pub struct LoginLink(String);

impl fmt::Display for LoginLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for LoginLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoginLink(…)")
    }
}

/// What a browser gets that used its link.
pub(crate) struct OpenedSession {
    /// Value of the header `Set-Cookie`.
    pub(crate) set_cookie: String,
    /// What the page sends as a header.
    pub(crate) page_token: String,
}

impl Access {
    /// Nobody may use this address yet.
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            grants: Mutex::default(),
        }
    }

    /// The address that is served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A new bearer token of a user, for programs.
    pub fn create_token(&self, requester: Requester) -> String {
        let token = create_secret();
        push_bounded(&mut self.lock().bearers, (token.clone(), requester), |it| {
            &it.1
        });
        token
    }

    /// The bearer token of a user who has one, else a new one: a program that asks again and again
    /// takes no token from others.
    pub fn token_of(&self, requester: &Requester) -> String {
        let known = {
            let grants = self.lock();
            let mut bearers = grants.bearers.iter();
            let known = bearers.find(|(_, owner)| owner == requester);
            known.map(|(token, _)| token.clone())
        };
        known.unwrap_or_else(|| self.create_token(requester.clone()))
    }

    /// A new link that opens the page of a user once.
    pub fn create_login_link(&self, requester: Requester) -> LoginLink {
        let code = create_secret();
        push_bounded(&mut self.lock().links, (code.clone(), requester), |it| {
            &it.1
        });
        LoginLink(format!("http://{}/login?code={code}", self.address))
    }

    /// Ends all that a user was given here: tokens, links, sessions and open streams.
    pub fn revoke_user(&self, user: &str) {
        let mut grants = self.lock();
        grants.bearers.retain(|(_, it)| it.user != user);
        grants.links.retain(|(_, it)| it.user != user);
        grants.sessions.retain(|it| it.requester.user != user);
        *grants.revocations.entry(user.to_owned()).or_default() += 1;
    }

    /// How often [`Self::revoke_user`] was called for a user: what began before is over.
    pub(crate) fn count_revocations(&self, user: &str) -> u64 {
        self.lock().revocations.get(user).copied().unwrap_or(0)
    }

    /// Opens a session for whoever has the code of a link. The code is worth nothing afterwards.
    pub(crate) fn open_session(&self, code: &str) -> Option<OpenedSession> {
        let mut grants = self.lock();
        let at = grants
            .links
            .iter()
            .position(|(known, _)| is_equal(known, code))?;
        let (_, requester) = grants.links.swap_remove(at);
        let session = Session {
            cookie: create_secret(),
            page_token: create_secret(),
            requester,
        };
        let opened = OpenedSession {
            set_cookie: format!(
                "{}={}; Path=/; HttpOnly; SameSite=Strict",
                self.cookie_name(),
                session.cookie
            ),
            page_token: session.page_token.clone(),
        };
        push_bounded(&mut grants.sessions, session, |it| &it.requester);
        Some(opened)
    }

    /// Whose call of the API this is.
    pub(crate) fn authenticate(
        &self,
        method: &Method,
        headers: &HeaderMap,
    ) -> ApiResult<Requester> {
        if let Some(bearer) = read_bearer(headers) {
            let grants = self.lock();
            let found = grants
                .bearers
                .iter()
                .find(|(known, _)| is_equal(known, bearer));
            let found = found.map(|(_, requester)| requester.clone());
            return found.ok_or_else(|| unauthenticated("the bearer token is unknown"));
        }
        let session = self.find_session(headers);
        let session = session.ok_or_else(|| unauthenticated("the request has no token"))?;
        let token = read_header(headers, &PAGE_TOKEN_HEADER).unwrap_or_default();
        if !is_equal(&session.page_token, token) {
            return Err(forged("the request lacks the token of the page"));
        }
        let site = read_header(headers, &FETCH_SITE_HEADER);
        if site.is_some_and(|site| site != "same-origin") {
            return Err(forged("another page sent the request"));
        }
        let is_change = !matches!(*method, Method::GET | Method::HEAD);
        if is_change && !is_own_origin(headers) {
            return Err(forged("the change comes from another page"));
        }
        Ok(session.requester)
    }

    /// Whether a browser has a session; that is enough for the page, which has no data.
    pub(crate) fn has_session(&self, headers: &HeaderMap) -> bool {
        self.find_session(headers).is_some()
    }

    fn find_session(&self, headers: &HeaderMap) -> Option<Session> {
        let name = self.cookie_name();
        let cookies = headers.get_all(COOKIE).iter();
        let cookies = cookies.filter_map(|value| value.to_str().ok());
        let mut pairs = cookies.flat_map(|value| value.split(';').map(str::trim));
        let value = pairs.find_map(|pair| pair.strip_prefix(&name)?.strip_prefix('='))?;
        let grants = self.lock();
        let mut sessions = grants.sessions.iter();
        sessions
            .find(|session| is_equal(&session.cookie, value))
            .cloned()
    }

    /// One for each port, or the pages of two runs would end each other's sessions.
    fn cookie_name(&self) -> String {
        format!("bafs_{}", self.address.port())
    }

    fn lock(&self) -> MutexGuard<'_, Grants> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rejects a request that came by a name that is not this machine's own: another one may be made to
/// point here by whoever owns it.
pub(crate) fn check_host(headers: &HeaderMap) -> ApiResult<()> {
    let host = read_header(headers, &HOST).unwrap_or_default();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    match LOOPBACK_NAMES.contains(&name) {
        true => Ok(()),
        false => Err(ApiError::new(
            StatusCode::MISDIRECTED_REQUEST,
            ErrorCode::RightMissing,
            "the host name of the request is not one of this machine itself",
            "Use 127.0.0.1 or localhost; from elsewhere, forward the port with ssh -L.",
        )),
    }
}

fn read_bearer(headers: &HeaderMap) -> Option<&str> {
    let value = read_header(headers, &AUTHORIZATION)?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn read_header<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Whether the page that sends a request was served under the name of the request.
fn is_own_origin(headers: &HeaderMap) -> bool {
    let host = read_header(headers, &HOST).unwrap_or_default();
    read_header(headers, &ORIGIN).and_then(|origin| origin.strip_prefix("http://")) == Some(host)
}

fn unauthenticated(message: &str) -> ApiError {
    Error::new(ErrorCode::TokenInvalid, message).into()
}

fn forged(message: &str) -> ApiError {
    ApiError::new(
        StatusCode::FORBIDDEN,
        ErrorCode::RightMissing,
        message,
        "Open the page again by a new login link.",
    )
}

fn push_bounded<T>(list: &mut Vec<T>, value: T, owner_of: fn(&T) -> &Requester) {
    let is_own = |it: &T| owner_of(it).user == owner_of(&value).user;
    if list.iter().filter(|it| is_own(it)).count() == SECRETS_OF_USER_MAX
        && let Some(oldest) = list.iter().position(is_own)
    {
        list.remove(oldest);
    }
    list.push(value);
}

fn create_secret() -> String {
    let mut bytes = [0; SECRET_BYTES];
    rand::rng().fill_bytes(&mut bytes);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compares all bytes, wherever the first difference is.
fn is_equal(known: &str, given: &str) -> bool {
    let pairs = known.bytes().zip(given.bytes());
    let difference = pairs.fold(0, |found, (one, other)| found | (one ^ other));
    known.len() == given.len() && difference == 0
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn access() -> Access {
        Access::new(([127, 0, 0, 1], 8123).into())
    }

    fn ann() -> Requester {
        Requester {
            user: "ann".to_owned(),
            is_operator: false,
            sees_others: false,
        }
    }

    fn headers(pairs: &[(&HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let value = HeaderValue::from_str(value).expect("it is a value");
            headers.insert(*name, value);
        }
        headers
    }

    fn open(access: &Access) -> (String, String) {
        let link = access.create_login_link(ann()).to_string();
        let code = link.split_once("code=").expect("a code").1;
        let opened = access.open_session(code).expect("it is new");
        assert!(access.open_session(code).is_none(), "a link opens once");
        let cookie = opened.set_cookie;
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"));
        let cookie = cookie.split(';').next().expect("a pair").to_owned();
        (cookie, opened.page_token)
    }

    #[test]
    fn session_needs_cookie_and_page_token() {
        let access = access();
        let (cookie, token) = open(&access);
        let may = |pairs: &[(&HeaderName, &str)], method: Method| {
            let found = access.authenticate(&method, &headers(pairs));
            found
                .map(|requester| requester.user)
                .map_err(|e| e.status())
        };
        let (cookie, token) = (cookie.as_str(), token.as_str());
        let both = [(&COOKIE, cookie), (&PAGE_TOKEN_HEADER, token)];
        assert_eq!(may(&both, Method::GET), Ok("ann".to_owned()));
        assert_eq!(may(&both[..1], Method::GET), Err(StatusCode::FORBIDDEN));
        assert_eq!(may(&both[1..], Method::GET), Err(StatusCode::UNAUTHORIZED));
        assert!(access.has_session(&headers(&both[..1])));
    }

    #[test]
    fn revoked_user_has_nothing_left() {
        let access = access();
        let (cookie, token) = open(&access);
        let bearer = format!("Bearer {}", access.token_of(&ann()));
        assert_eq!(bearer, format!("Bearer {}", access.token_of(&ann())));
        let link = access.create_login_link(ann()).to_string();
        let code = link.split_once("code=").expect("a code").1;
        access.revoke_user("bob");
        let may = |pairs: &[(&HeaderName, &str)]| {
            access.authenticate(&Method::GET, &headers(pairs)).is_ok()
        };
        let session = [
            (&COOKIE, cookie.as_str()),
            (&PAGE_TOKEN_HEADER, token.as_str()),
        ];
        assert!(may(&session) && may(&[(&AUTHORIZATION, &bearer)]));
        access.revoke_user("ann");
        assert!(!may(&session) && !may(&[(&AUTHORIZATION, &bearer)]));
        assert!(access.open_session(code).is_none());
        assert_eq!(access.count_revocations("ann"), 1);
    }

    #[test]
    fn user_ends_no_session_of_others() {
        let access = access();
        let bearer = |token: String| {
            let value = format!("Bearer {token}");
            let headers = headers(&[(&AUTHORIZATION, &value)]);
            access.authenticate(&Method::GET, &headers).is_ok()
        };
        let (first, bob) = (access.create_token(ann()), || Requester {
            user: "bob".to_owned(),
            ..ann()
        });
        let his: Vec<String> = (0..100).map(|_| access.create_token(bob())).collect();
        assert!(bearer(first), "hers stays");
        let held = his.into_iter().filter(|token| bearer(token.clone()));
        assert_eq!(held.count(), SECRETS_OF_USER_MAX);
    }

    #[test]
    fn forged_change_is_rejected() {
        let access = access();
        let (cookie, token) = open(&access);
        let host = "127.0.0.1:8123";
        let own = [
            (&COOKIE, cookie.as_str()),
            (&PAGE_TOKEN_HEADER, token.as_str()),
            (&HOST, host),
        ];
        let post = |more: &[(&HeaderName, &str)]| {
            let headers = headers(&[&own, more].concat());
            access.authenticate(&Method::POST, &headers).is_ok()
        };
        assert!(post(&[(&ORIGIN, "http://127.0.0.1:8123")]));
        assert!(!post(&[]), "without an origin");
        assert!(!post(&[(&ORIGIN, "http://127.0.0.1:9999")]));
        assert!(!post(&[(&ORIGIN, "null")]));
        let site = [
            (&ORIGIN, "http://127.0.0.1:8123"),
            (&FETCH_SITE_HEADER, "same-site"),
        ];
        assert!(!post(&site));
    }

    #[test]
    fn bearer_token_identifies_its_user() {
        let access = access();
        let token = format!("Bearer {}", access.create_token(ann()));
        let may = |value: &str| {
            let headers = headers(&[(&AUTHORIZATION, value)]);
            access.authenticate(&Method::POST, &headers).is_ok()
        };
        assert!(may(&token) && may(&token.replace("Bearer", "bearer")));
        assert!(!may("Bearer x") && !may(&token[..token.len() - 1]) && !may("Basic x"));
    }

    #[test]
    fn foreign_host_names_are_rejected() {
        let is_own = |host: &str| check_host(&headers(&[(&HOST, host)])).is_ok();
        for host in [
            "127.0.0.1:8123",
            "localhost",
            "localhost:99",
            "[::1]:8123",
            "[::1]",
        ] {
            assert!(is_own(host), "{host}");
        }
        for host in [
            "evil.example:8123",
            "127.0.0.1.evil.example",
            "localhost:8123x",
            "",
        ] {
            assert!(!is_own(host), "{host}");
        }
        assert!(check_host(&HeaderMap::new()).is_err());
    }
}
