//! Who may know whom: crates, dependencies of one file, pure logic, unsafe code. The tables come
//! first: a new arrow is a line here, a line in ARCHITECTURE.md, and a decision record.

use std::collections::BTreeMap;

use super::Finding;
use super::files::File;
use super::source::{code_only, has_word, without_tests, word_starts};

/// A dependency that is named in few places, so that replacing it touches few.
struct Enclosed {
    /// As it is written in code.
    name: &'static str,
    /// Files (or the beginnings of their paths) that may name it.
    places: &'static [&'static str],
    /// In how many files altogether.
    files_max: usize,
}

const ENCLOSED: &[Enclosed] = &[
    Enclosed {
        name: "quinn",
        places: &[
            "bafs-proto/src/net/quic.rs",
            "bafs-proto/src/net/quic/listener.rs",
        ],
        files_max: 2,
    },
    Enclosed {
        name: "tokio_rustls",
        places: &["bafs-proto/src/net/tls.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "bincode",
        places: &["bafs-proto/src/codec.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "blake3",
        places: &["bafs-proto/src/hash.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "biscuit_auth",
        places: &["bafs-proto/src/token.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "rcgen",
        places: &["bafs-proto/src/identity.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "fuser",
        places: &["bafs-client/src/fuse", "tests/src/bench/smallest"],
        files_max: usize::MAX,
    },
    Enclosed {
        name: "io_uring",
        places: &["bafs-client/src/kernel.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "lru",
        places: &["bafs-server/src/"],
        files_max: 1,
    },
    Enclosed {
        name: "opendal",
        places: &["bafs-server/src/homes/objects"],
        files_max: 3,
    },
    Enclosed {
        name: "opendal_http_transport_reqwest",
        places: &["bafs-server/src/homes/objects"],
        files_max: 1,
    },
    Enclosed {
        name: "redb",
        places: &["bafs-server/src/"],
        files_max: 1,
    },
    Enclosed {
        name: "toml",
        places: &[
            "bafs-sched/src/planner/environment.rs",
            "bafs-server/src/homes/settings.rs",
        ],
        files_max: 2,
    },
    Enclosed {
        name: "hyper",
        places: &["bafs/src/metrics/http.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "hyper_util",
        places: &["bafs/src/metrics/http.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "prometheus_client",
        places: &["bafs/src/metrics/text.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "plotters",
        places: &["bafs/src/picture.rs"],
        files_max: 1,
    },
    Enclosed {
        name: "clap",
        places: &["bafs/", "xtask/"],
        files_max: usize::MAX,
    },
];

/// Which of our crates a crate of ours may depend on, for its tests too.
const CRATES: &[(&str, &[&str])] = &[
    ("bafs-proto", &[]),
    ("bafs-tree", &["bafs-proto"]),
    ("bafs-server", &["bafs-proto", "bafs-tree"]),
    ("bafs-client", &["bafs-proto", "bafs-tree"]),
    ("bafs-sched", &["bafs-proto"]),
    (
        "bafs",
        &[
            "bafs-proto",
            "bafs-tree",
            "bafs-server",
            "bafs-client",
            "bafs-sched",
        ],
    ),
    (
        "bafs-tests",
        &[
            "bafs-proto",
            "bafs-tree",
            "bafs-server",
            "bafs-client",
            "bafs-sched",
            "bafs",
        ],
    ),
    ("xtask", &[]),
];

/// What decides has no business with these: they wait, touch the world, or differ between runs.
const NOT_IN_LOGIC: [&str; 11] = [
    "async",
    "std::fs",
    "std::net",
    "std::thread",
    "tokio",
    "Instant::now",
    "SystemTime",
    "HashMap",
    "HashSet",
    "rand",
    "quinn",
];

/// The only file of a crate that may hold unsafe code: calls that no safe crate offers.
const UNSAFE_FILE: &str = "kernel.rs";

/// Rules about one file.
pub(super) fn check_file(file: &File) -> Vec<Finding> {
    if !file.is("rs") {
        return Vec::new();
    }
    let code = code_only(&file.text);
    let mut findings = check_enclosed(&file.path, &code);
    if file
        .path
        .split('/')
        .any(|part| part == "logic" || part == "logic.rs")
    {
        findings.extend(check_logic(&file.path, without_tests(&code)));
    }
    if file_name(&file.path) != UNSAFE_FILE {
        findings.extend(lines_with(&file.path, &code, "unsafe", |_| {
            format!("unsafe code belongs into the crate's `{UNSAFE_FILE}`")
        }));
    }
    findings
}

fn check_enclosed(path: &str, code: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for rule in ENCLOSED {
        if rule.places.iter().any(|place| path.starts_with(place)) {
            continue;
        }
        for (index, line) in code.lines().enumerate() {
            if names_crate(line, rule.name) {
                let places = rule.places.join(", ");
                let what = format!("`{}` may be named only in {places}", rule.name);
                findings.push(Finding::new(path, index + 1, what));
            }
        }
    }
    findings
}

/// Whether the line names the crate: `name::…` or `use name…`, not a module `…::name::`.
fn names_crate(line: &str, name: &str) -> bool {
    word_starts(line, name).into_iter().any(|start| {
        let before = line[..start].trim_end();
        let after = line[start + name.len()..].trim_start();
        let leads_path = before.strip_suffix("::").is_none_or(|rest| {
            // A leading `::` means the crate itself.
            !rest.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '>')
        });
        let imported = before.ends_with("use") && after.starts_with([';', ' ']);
        leads_path && after.starts_with("::") || imported
    })
}

fn check_logic(path: &str, code: &str) -> Vec<Finding> {
    let rule = |word: &str| format!("`logic/` decides and does nothing else: no `{word}` in it");
    NOT_IN_LOGIC
        .iter()
        .flat_map(|word| lines_with(path, code, word, rule))
        .collect()
}

fn lines_with(path: &str, code: &str, word: &str, what: impl Fn(&str) -> String) -> Vec<Finding> {
    let lines = code
        .lines()
        .enumerate()
        .filter(|(_, line)| has_word(line, word));
    lines
        .map(|(index, _)| Finding::new(path, index + 1, what(word)))
        .collect()
}

/// Rules about all files: in how many a dependency is named, how many hold unsafe code.
pub(super) fn check_shares(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let rust: Vec<_> = files
        .iter()
        .filter(|file| file.is("rs"))
        .map(|file| (file, code_only(&file.text)))
        .collect();
    for rule in ENCLOSED {
        let in_place = |path: &str| rule.places.iter().any(|place| path.starts_with(place));
        let named = rust
            .iter()
            .filter(|(file, code)| {
                in_place(&file.path) && code.lines().any(|line| names_crate(line, rule.name))
            })
            .skip(rule.files_max);
        findings.extend(named.map(|(file, _)| {
            let what = format!(
                "`{}` is named in more than {} file",
                rule.name, rule.files_max
            );
            Finding::new(&file.path, 0, what)
        }));
    }
    let mut kernel_files = BTreeMap::new();
    for (file, _) in rust
        .iter()
        .filter(|(file, _)| file_name(&file.path) == UNSAFE_FILE)
    {
        let crate_dir = file.path.split('/').next().unwrap_or_default();
        if let Some(first) = kernel_files.insert(crate_dir, &file.path) {
            let what = format!("a crate has one `{UNSAFE_FILE}`; there is {first} already");
            findings.push(Finding::new(&file.path, 0, what));
        }
    }
    findings
}

/// Rules about the arrows between our crates, from `cargo metadata`.
pub(super) fn check_crates(metadata: &serde_json::Value) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let place = format!("{name}/Cargo.toml");
        let Some((_, allowed)) = CRATES.iter().find(|(known, _)| *known == name) else {
            let what = "a crate that xtask/src/tidy/layers.rs does not know";
            findings.push(Finding::new(&place, 0, what));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().unwrap_or_default();
            let ours = CRATES.iter().any(|(known, _)| *known == target);
            if ours && !allowed.contains(&target) {
                let what = format!("{name} must not depend on {target}");
                findings.push(Finding::new(&place, 0, what));
            }
        }
    }
    findings
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file(path: &str, text: &str) -> File {
        File {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    fn check(path: &str, text: &str, expected: usize) {
        let found = check_file(&file(path, text));
        assert_eq!(found.len(), expected, "{path}: {text}: {found:?}");
    }

    #[test]
    fn a_dependency_is_named_only_where_the_table_says() {
        check("bafs-proto/src/codec.rs", "use bincode::config;", 0);
        check("bafs-proto/src/message.rs", "use bincode::config;", 1);
        check(
            "bafs-proto/src/message.rs",
            "let a = ::bincode::config();",
            1,
        );
        check("bafs-proto/src/message.rs", "// bincode::config", 0);
        check(
            "bafs-server/src/io/store.rs",
            "use crate::logic::lru::Blocks;",
            0,
        );
        check("bafs-sched/src/driver.rs", "use lru::LruCache;", 1);
        check("bafs-client/src/fuse/reply.rs", "use fuser::Reply;", 0);
        check("bafs-client/src/agent.rs", "pub use fuser;", 1);
        check("bafs-client/src/agent.rs", "let fuser = 1; fuser.len();", 0);
    }

    #[test]
    fn a_dependency_of_one_file_is_in_one_file() {
        let one = file("bafs-server/src/logic/blocks.rs", "use lru::LruCache;");
        let two = file(
            "bafs-server/src/io/fetch.rs",
            "fn a(b: lru::LruCache<u8, u8>) {}",
        );
        assert!(check_shares(&[file("a.rs", ""), one]).is_empty());
        let one = file("bafs-server/src/logic/blocks.rs", "use lru::LruCache;");
        assert_eq!(check_shares(&[one, two]).len(), 1);
    }

    #[test]
    fn logic_is_pure() {
        check(
            "bafs-sched/src/logic/graph.rs",
            "use std::collections::BTreeMap;",
            0,
        );
        check(
            "bafs-sched/src/logic/graph.rs",
            "use std::collections::HashMap;",
            1,
        );
        check(
            "bafs-sched/src/logic/graph.rs",
            "async fn a() { tokio::spawn(b) }",
            2,
        );
        check(
            "bafs-sched/src/logic/graph.rs",
            "/// Not async.\nfn operand() {}",
            0,
        );
        check(
            "bafs-sched/src/logic/graph.rs",
            "fn a() {}\n#[cfg(test)]\nuse std::fs;",
            0,
        );
        check("bafs-sched/src/io/journal.rs", "use std::fs;", 0);
    }

    #[test]
    fn unsafe_code_has_one_file_per_crate() {
        check("bafs-client/src/io/job.rs", "unsafe { fork() }", 1);
        check(
            "bafs-client/src/io/job.rs",
            "#![deny(unsafe_code)] // unsafe",
            0,
        );
        check("bafs-client/src/io/kernel.rs", "unsafe { fork() }", 0);
        let first = file("bafs-client/src/io/kernel.rs", "");
        let second = file("bafs-client/src/kernel.rs", "");
        let other = file("bafs-server/src/kernel.rs", "");
        assert_eq!(check_shares(&[first, second, other]).len(), 1);
    }

    #[test]
    fn crates_depend_in_one_direction() {
        let metadata = |name: &str, target: &str| {
            let dependencies = json!([{"name": target}]);
            json!({"packages": [{"name": name, "dependencies": dependencies}]})
        };
        assert!(check_crates(&metadata("bafs-server", "bafs-proto")).is_empty());
        assert!(check_crates(&metadata("bafs-server", "serde")).is_empty());
        assert_eq!(
            check_crates(&metadata("bafs-server", "bafs-client")).len(),
            1
        );
        assert_eq!(check_crates(&metadata("bafs-sched", "bafs-tree")).len(), 1);
        assert_eq!(check_crates(&metadata("bafs-proto", "bafs-tree")).len(), 1);
        assert_eq!(check_crates(&metadata("bafs-new", "serde")).len(), 1);
    }
}
