//! Which home a URL of a workflow means, and which path there. Asks nobody.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::hash::Digest;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{Advert, ServerKind};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::{Scheme, Url, Workflow};
use serde::{Deserialize, Serialize};

use crate::Event;

/// The home server that stands for `file:///…` of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHome {
    /// Where it listens, `host:port`.
    pub address: String,
    /// The absolute path of the directory that it exports, without a trailing slash.
    pub root: String,
}

/// Listings in a row without a home after which it counts as away: a catalog that starts anew
/// lists none at first.
const MISSING_LISTINGS_MAX: u32 = 3;

/// Former addresses of a home that are remembered.
const FORMER_ADDRESSES_MAX: usize = 8;

/// Home servers by name.
#[derive(Debug, Clone, Default)]
pub struct Homes {
    file_home: Option<FileHome>,
    by_name: BTreeMap<String, KnownHome>,
    is_listed: bool,
    /// Names that the journal should say the meaning of, and does not yet.
    unjournaled_names: BTreeSet<String>,
    /// What the journal says of names, as events.
    journaled_names: BTreeMap<String, Event>,
    /// Names that no listing had yet, each with a URL that needs it.
    missing_names: BTreeMap<String, String>,
    /// Listings so far without them.
    listings_without: u32,
}

/// A home that has a name for the whole run.
#[derive(Debug, Clone)]
struct KnownHome {
    server: ServerId,
    address: String,
    /// Where it was before, last of all at the end: errors of calls that began then name that.
    former_addresses: Vec<String>,
    /// Another one that was listed under the name, and of which somebody was told.
    reported_conflict: Option<ServerId>,
    /// The run needs it.
    is_needed: bool,
    /// Listings in a row that did not have it.
    missing_listings: u32,
    /// This process saw it listed; the journal alone does not say that it is still there.
    is_listed: bool,
}

impl KnownHome {
    fn new(server: ServerId, address: &str) -> Self {
        Self {
            server,
            address: address.to_owned(),
            former_addresses: Vec::new(),
            reported_conflict: None,
            is_needed: false,
            missing_listings: 0,
            is_listed: false,
        }
    }

    fn is_unreachable(&self) -> bool {
        self.missing_listings >= MISSING_LISTINGS_MAX
    }
}

/// A place at home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HomePath {
    /// The home server, `host:port`; or scheme and host of what nodes reach by themselves.
    pub address: String,
    /// Path below that, without a leading slash.
    pub path: String,
    /// Which home server that is, if the catalog knows.
    pub id: Option<ServerId>,
}

impl HomePath {
    /// The cooperative cache of a source: one for all runs and users, so that a byte crosses the
    /// link from home once for all of them. Nodes tell states of the source apart by their
    /// manifests.
    #[must_use]
    pub fn cooperative_name(&self) -> String {
        let last = self.path.rsplit('/').next().unwrap_or_default();
        let is_plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let readable: String = last.chars().filter(is_plain).take(40).collect();
        let source = format!("{}\0{:?}\0{}", self.address, self.id, self.path);
        let digest = Digest::of(source.as_bytes()).to_string();
        format!("{readable}-{}", &digest[..16])
    }

    /// Whether a home server is there, and not what nodes reach by themselves.
    pub(crate) fn is_server(&self) -> bool {
        !self.address.contains("://")
    }
}

impl Homes {
    /// No home but the one for file URLs, if there is one.
    pub fn new(file_home: Option<FileHome>) -> Self {
        Self {
            file_home,
            by_name: BTreeMap::new(),
            is_listed: false,
            unjournaled_names: BTreeSet::new(),
            journaled_names: BTreeMap::new(),
            missing_names: BTreeMap::new(),
            listings_without: 0,
        }
    }

    /// The same for a run of `workflow`, whose journal keeps which homes its names mean.
    pub fn for_workflow(file_home: Option<FileHome>, workflow: &Workflow) -> Self {
        let named = workflow
            .urls()
            .filter(|url| url.scheme == Scheme::Bafs && !url.host.contains(':'));
        let missing_names: BTreeMap<_, _> = named
            .map(|url| (url.host.clone(), url.to_string()))
            .collect();
        Self {
            unjournaled_names: missing_names.keys().cloned().collect(),
            missing_names,
            ..Self::new(file_home)
        }
    }

    /// Takes up what the journal says that a name means, if this is what it says.
    pub fn apply_event(&mut self, event: &Event) {
        if let Event::HomeListed {
            name,
            server,
            address,
        } = event
        {
            self.unjournaled_names.remove(name);
            let known = KnownHome {
                is_needed: true,
                ..KnownHome::new(*server, address)
            };
            self.by_name.insert(name.clone(), known);
            self.note_journaled(event);
        }
    }

    /// The journal says from now on what a name means, if that is the event.
    pub(crate) fn note_journaled(&mut self, event: &Event) {
        if let Event::HomeListed { name, .. } = event {
            self.journaled_names.insert(name.clone(), event.clone());
        }
    }

    /// What the journal says of names, as events.
    pub(crate) fn journaled_names(&self) -> Vec<Event> {
        self.journaled_names.values().cloned().collect()
    }

    /// What the journal is to say from now on of the names that the workflow has.
    pub fn take_unjournaled(&mut self) -> Vec<Event> {
        let by_name = &self.by_name;
        let known = self
            .unjournaled_names
            .extract_if(.., |name| by_name.contains_key(name));
        let seen = known.filter_map(|name| {
            let known = by_name.get(&name)?;
            Some(Event::HomeListed {
                server: known.server,
                address: known.address.clone(),
                name,
            })
        });
        seen.collect()
    }

    /// Learns the homes of a catalog's listing; those that it does not list are kept, because a
    /// home that is away for a moment is still the same place. So is one whose name another home
    /// has now: a run that took its inputs from one directory must not send results to another.
    /// Returns what somebody should be told of that, once for each.
    pub fn update_from_listing(&mut self, adverts: &[Advert]) -> Vec<String> {
        self.is_listed = true;
        let homes = adverts.iter().filter(|it| it.kind == ServerKind::Home);
        let mut told: Vec<_> = homes
            .clone()
            .filter_map(|home| self.update_home(home))
            .collect();
        told.extend(self.report_missing_names());
        let listed: BTreeSet<_> = homes.map(|home| home.id).collect();
        for (name, known) in &mut self.by_name {
            let was_away = known.is_unreachable();
            known.missing_listings = match listed.contains(&known.server) {
                true => 0,
                false => known.missing_listings.saturating_add(1),
            };
            let at = &known.address;
            match (known.is_needed, was_away, known.is_unreachable()) {
                (true, false, true) => told.push(format!(
                    "home '{name}' ({at}) is away: what needs it waits or is tried again; start \
                     it again, at whatever address"
                )),
                (true, true, false) => told.push(format!("home '{name}' is back, at {at}")),
                _ => {}
            }
        }
        told
    }

    /// What to tell of names that no home has, once, before the first job asks for one: jobs may
    /// take hours before their results do.
    fn report_missing_names(&mut self) -> Vec<String> {
        let by_name = &self.by_name;
        self.missing_names
            .retain(|name, _| !by_name.contains_key(name));
        self.listings_without = self.listings_without.saturating_add(1);
        if self.listings_without != MISSING_LISTINGS_MAX {
            return Vec::new();
        }
        let listed: Vec<_> = by_name.keys().map(|name| format!("'{name}'")).collect();
        let listed = match listed.is_empty() {
            true => "no home".to_owned(),
            false => listed.join(", "),
        };
        let tell = |(name, url): (&String, &String)| {
            format!(
                "no home is called '{name}', which {url} needs; the catalog lists {listed}: start \
                 it, or stop this run and correct the workflow; what needs it waits"
            )
        };
        self.missing_names.iter().map(tell).collect()
    }

    /// Whether somebody was told that no home has the name of a URL.
    pub(crate) fn is_reported_missing(&self, url: &Url) -> bool {
        let is_told = self.listings_without >= MISSING_LISTINGS_MAX;
        is_told && url.scheme == Scheme::Bafs && self.missing_names.contains_key(&url.host)
    }

    /// Whether an error comes of a home being away, of which the user was told.
    pub fn is_reported_outage(&self, error: &Error) -> bool {
        let told = self.by_name.values();
        let mut told = told.filter(|known| known.is_needed && known.is_unreachable());
        told.any(|known| {
            let mut places = known.former_addresses.iter().chain([&known.address]);
            places.any(|address| has_address(&error.detail, address))
        })
    }

    fn update_home(&mut self, home: &Advert) -> Option<String> {
        let name = home.name.to_ascii_lowercase();
        let known = self.by_name.entry(name);
        let known = known.or_insert_with(|| KnownHome::new(home.id, &home.address));
        if known.server == home.id {
            known.is_listed = true;
            if known.address != home.address {
                let former = std::mem::replace(&mut known.address, home.address.clone());
                known.former_addresses.push(former);
                let beyond = known
                    .former_addresses
                    .len()
                    .saturating_sub(FORMER_ADDRESSES_MAX);
                known.former_addresses.drain(..beyond);
            }
            return None;
        }
        if known.reported_conflict.replace(home.id) == Some(home.id) {
            return None;
        }
        Some(format!(
            "home '{}' is another server now, at {}: this run goes on with the one at {}, \
             which it began with; start that again, or begin the run anew",
            home.name, home.address, known.address
        ))
    }

    /// Whether the catalog was heard of at all: without it no name can be called wrong.
    pub fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// The place that a URL names.
    ///
    /// # Errors
    /// `Unreachable` when the catalog knows no home of that name (yet), `BadPath` when a file is
    /// not below the exported directory or a URL of the web has a query.
    pub fn resolve_url(&mut self, url: &Url) -> Result<HomePath> {
        match url.scheme {
            Scheme::Bafs => {
                let known = self.by_name.get_mut(&url.host);
                let known = known.filter(|home| home.is_listed).map(|home| {
                    home.is_needed = true;
                    (home.address.clone(), Some(home.server))
                });
                let is_literal = url.host.contains(':');
                let literal =
                    is_literal.then(|| (url.host.clone(), self.find_id_by_address(&url.host)));
                let (address, id) = known.or(literal).ok_or_else(|| {
                    let text = format!(
                        "home '{}' of {url} is not in the catalog: start it, correct the name, or \
                         write its address as bafs://HOST:PORT/PATH",
                        url.host
                    );
                    Error::new(ErrorCode::Unreachable, text)
                })?;
                Ok(HomePath {
                    address,
                    path: strip_root(&url.path),
                    id,
                })
            }
            Scheme::File => match &self.file_home {
                Some(home) => resolve_file(url, home, self.find_id_by_address(&home.address)),
                None => resolve_foreign(url),
            },
            Scheme::Ftp
            | Scheme::Ftps
            | Scheme::Http
            | Scheme::Https
            | Scheme::S3
            | Scheme::Sftp => resolve_foreign(url),
        }
    }

    /// The home that stands for `file:///…`, if there is one.
    pub(crate) fn file_home(&self) -> Option<&FileHome> {
        self.file_home.as_ref()
    }

    /// Which home server the host of a URL is, by its name or its address, as far as the catalog
    /// told.
    pub(crate) fn server_of_host(&self, host: &str) -> Option<ServerId> {
        let named = self.by_name.get(host).map(|home| home.server);
        named.or_else(|| self.find_id_by_address(host))
    }

    /// The home server that the catalog lists at an address.
    fn find_id_by_address(&self, address: &str) -> Option<ServerId> {
        let mut known = self.by_name.values();
        known
            .find(|home| home.is_listed && home.address == address)
            .map(|home| home.server)
    }
}

/// A place that the nodes reach by themselves.
fn resolve_foreign(url: &Url) -> Result<HomePath> {
    let place = url.foreign_location();
    let (address, path) = place.map_err(|e| Error::new(ErrorCode::BadPath, e.to_string()))?;
    Ok(HomePath {
        address,
        path,
        id: None,
    })
}

fn resolve_file(url: &Url, home: &FileHome, id: Option<ServerId>) -> Result<HomePath> {
    let root = home.root.trim_end_matches('/');
    match url.path.strip_prefix(root) {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => Ok(HomePath {
            address: home.address.clone(),
            path: strip_root(rest),
            id,
        }),
        _ => {
            let text = format!("{url} is not below '{root}', the directory that the home exports");
            Err(Error::new(ErrorCode::BadPath, text))
        }
    }
}

fn strip_root(path: &str) -> String {
    path.trim_start_matches('/').to_owned()
}

/// Whether a text has this very address, and not one that begins or ends like it.
fn has_address(text: &str, address: &str) -> bool {
    let goes_on = |sign: char| sign.is_ascii_alphanumeric() || sign == '-';
    text.match_indices(address).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let behind = text[at + address.len()..].chars().next();
        !before.is_some_and(|sign| goes_on(sign) || sign == '.') && !behind.is_some_and(goes_on)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::attributes::Attributes;
    use bafs_proto::message::Lifetime;

    fn resolve_path(homes: &mut Homes, url: &str) -> Result<HomePath, ErrorCode> {
        homes
            .resolve_url(&url.parse().unwrap())
            .map_err(|error| error.code)
    }

    fn home_advert(id: u64, address: &str) -> Advert {
        Advert {
            id: ServerId(id),
            kind: ServerKind::Home,
            name: "Home".to_owned(),
            address: address.to_owned(),
            group: String::new(),
            ttl_ms: 4_000,
            capacity_bytes: 0,
            capacity_files: 0,
            free_bytes: 0,
            free_files: 0,
            slots: 0,
            jobs: 0,
            caches: Vec::new(),
            lifetime: Lifetime::default(),
            attributes: Attributes::default(),
        }
    }

    #[test]
    fn home_name_keeps_its_server_throughout_a_run() {
        let mut homes = Homes::default();
        assert!(
            homes
                .update_from_listing(&[home_advert(1, "a:1")])
                .is_empty()
        );
        let told = homes.update_from_listing(&[home_advert(2, "b:1")]);
        assert!(
            told[0].contains("at b:1: this run goes on with the one at a:1"),
            "{told:?}"
        );
        assert!(
            homes
                .update_from_listing(&[home_advert(2, "b:1")])
                .is_empty(),
            "told once"
        );
        let place = |homes: &mut Homes| homes.resolve_url(&"bafs://home/x".parse().unwrap());
        assert_eq!(place(&mut homes).unwrap().address, "a:1");
        // The same server may come back somewhere else.
        assert!(
            homes
                .update_from_listing(&[home_advert(1, "a:2")])
                .is_empty()
        );
        assert_eq!(place(&mut homes).unwrap().address, "a:2");
    }

    #[test]
    fn home_name_keeps_its_server_after_a_restart() {
        let text = "volume d cache bafs://home/d 1 MB\nvolume s scratch 1 MB files 2\n\
            job j {\nexecutable = x\n}\nmount d j /d\nmount s j /s\n\
            extract s x bafs://Other/x\n";
        let none = |path: &str| Err(path.to_owned());
        let workflow = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = workflow.expect("it is right").workflow;
        let mut homes = Homes::for_workflow(None, &workflow);
        assert_eq!(homes.take_unjournaled(), []);
        let third = Advert {
            name: "third".to_owned(),
            ..home_advert(3, "c:1")
        };
        homes.update_from_listing(&[home_advert(1, "a:1"), third]);
        let kept = homes.take_unjournaled();
        let meant = Event::HomeListed {
            name: "home".to_owned(),
            server: ServerId(1),
            address: "a:1".to_owned(),
        };
        assert_eq!(kept, [meant]);
        assert_eq!(homes.take_unjournaled(), []);

        let mut again = Homes::for_workflow(None, &workflow);
        again.apply_event(&kept[0]);
        let told = again.update_from_listing(&[home_advert(2, "b:1")]);
        assert!(told[0].contains("goes on with the one at a:1"), "{told:?}");
        assert_eq!(again.take_unjournaled(), []);
        let waits = Err(ErrorCode::Unreachable);
        assert_eq!(resolve_path(&mut again, "bafs://home/x"), waits);
        again.update_from_listing(&[home_advert(1, "a:2")]);
        let place = resolve_path(&mut again, "bafs://home/x").expect("it is back");
        assert_eq!(
            (place.address.as_str(), place.id),
            ("a:2", Some(ServerId(1)))
        );
    }

    #[test]
    fn unknown_home_name_is_reported_before_its_use() {
        let text = "volume s scratch 1 MB\njob j {\nexecutable = x\n}\nmount s j /s\n\
            extract s x bafs://hom/x\nextract s y bafs://home/y\n";
        let none = |path: &str| Err(path.to_owned());
        let workflow = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = workflow.expect("it is right").workflow;
        let mut homes = Homes::for_workflow(None, &workflow);
        let mut told = Vec::new();
        for _ in 0..9 {
            told.extend(homes.update_from_listing(&[home_advert(1, "a:1")]));
        }
        assert_eq!(told.len(), 1, "{told:?}");
        let wanted = "no home is called 'hom', which bafs://hom/x needs; the catalog lists 'home'";
        assert!(told[0].starts_with(wanted), "{told:?}");
    }

    #[test]
    fn home_outage_and_return_are_each_reported_once() {
        let mut homes = Homes::default();
        let learn = |homes: &mut Homes, listed: &[Advert], times: usize| -> Vec<String> {
            (0..times)
                .flat_map(|_| homes.update_from_listing(listed))
                .collect()
        };
        assert!(learn(&mut homes, &[home_advert(1, "a:1")], 1).is_empty());
        assert!(learn(&mut homes, &[], 9).is_empty(), "nobody needs it");
        assert!(learn(&mut homes, &[home_advert(1, "a:1")], 1).is_empty());
        assert!(resolve_path(&mut homes, "bafs://home/x").is_ok());
        assert!(
            learn(&mut homes, &[], 2).is_empty(),
            "a catalog that starts"
        );
        let failed = Error::new(ErrorCode::Unreachable, "nobody answers at a:1");
        assert!(!homes.is_reported_outage(&failed));
        let told = learn(&mut homes, &[], 20);
        assert!(told.len() == 1 && told[0].contains("is away"), "{told:?}");
        assert!(homes.is_reported_outage(&failed));
        let other = Error::new(ErrorCode::Unreachable, "nobody answers at n:1");
        assert!(
            !homes.is_reported_outage(&other),
            "a node is something else"
        );
        for like in [
            "nobody answers at a:12",
            "nobody answers at b.a:1",
            "aa:1 is slow",
        ] {
            let other = Error::new(ErrorCode::Unreachable, like);
            assert!(!homes.is_reported_outage(&other), "{like}");
        }
        // Another one of its name is not it.
        let told = learn(&mut homes, &[home_advert(2, "b:1")], 5);
        assert!(
            told.len() == 1 && told[0].contains("is another server"),
            "{told:?}"
        );
        let told = learn(&mut homes, &[home_advert(1, "a:2")], 5);
        assert_eq!(told, ["home 'home' is back, at a:2"]);
        assert!(!homes.is_reported_outage(&failed));
        assert_eq!(learn(&mut homes, &[], 5).len(), 1);
        let away = |at: &str| Error::new(ErrorCode::HomeUnreachable, format!("home {at} is away"));
        assert!(homes.is_reported_outage(&away("a:1")), "it was there");
        assert!(homes.is_reported_outage(&away("a:2")));
        assert!(
            !homes.is_reported_outage(&away("c:1")),
            "a home that is listed still"
        );
    }

    #[test]
    fn urls_resolve_by_name_address_or_file_path() {
        let file_home = FileHome {
            address: "f:1".to_owned(),
            root: "/srv/data".to_owned(),
        };
        let mut homes = Homes::new(Some(file_home));
        let at = |id: Option<u64>, address: &str, path: &str| {
            Ok(HomePath {
                address: address.to_owned(),
                path: path.to_owned(),
                id: id.map(ServerId),
            })
        };
        let place = |address: &str, path: &str| at(None, address, path);
        assert_eq!(
            resolve_path(&mut homes, "bafs://home/a"),
            Err(ErrorCode::Unreachable)
        );
        assert!(
            homes
                .update_from_listing(&[home_advert(1, "h:2")])
                .is_empty()
        );
        let known = at(Some(1), "h:2", "a/b");
        assert_eq!(resolve_path(&mut homes, "bafs://Home/a/b"), known);
        assert_eq!(resolve_path(&mut homes, "bafs://h:2/a/b"), known);
        assert_eq!(
            resolve_path(&mut homes, "bafs://10.0.0.1:7/"),
            place("10.0.0.1:7", "")
        );
        assert_eq!(
            resolve_path(&mut homes, "file:///srv/data/x"),
            place("f:1", "x")
        );
        assert_eq!(
            resolve_path(&mut homes, "file:///srv/data"),
            place("f:1", "")
        );
        assert_eq!(
            resolve_path(&mut homes, "file:///srv/database"),
            Err(ErrorCode::BadPath)
        );
        assert_eq!(
            resolve_path(&mut homes, "ftp://home/a"),
            place("ftp://home", "a")
        );
        assert_eq!(
            resolve_path(&mut homes, "http://h/a?b"),
            Err(ErrorCode::BadPath)
        );
        assert_eq!(
            resolve_path(&mut Homes::default(), "file:///a"),
            place("file://", "a")
        );
    }
}
