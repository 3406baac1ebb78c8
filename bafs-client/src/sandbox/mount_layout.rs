//! Where each volume goes in the new root and which host directories need a stand-in for
//! that. Pure: asks the host only through [`HostTree`], mounts nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What a path is, as far as mounting cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathKind {
    Directory,
    File,
}

/// What is in the place of a directory, so that nothing can be mounted on it or below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MountObstacle {
    File,
    DanglingLink,
    CircularLink,
}

impl MountObstacle {
    /// The end of a sentence that begins with the path.
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::File => "is a file",
            Self::DanglingLink => "is a symbolic link that leads nowhere",
            Self::CircularLink => "is a symbolic link that leads back to itself",
        }
    }
}

/// The little that the layout must know of the host.
pub(super) trait HostTree {
    /// The path without symbolic links and what is there; `None` if there is nothing.
    fn resolve(&self, path: &Path) -> Option<(PathBuf, PathKind)>;

    /// What is at `path`, a name in a directory without symbolic links, in place of a directory.
    fn obstacle_at(&self, path: &Path) -> Option<MountObstacle>;
}

/// One volume's place: `existing` is a real host path, `missing` the names to add below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MountPlacement {
    pub(super) existing: PathBuf,
    pub(super) missing: Vec<OsString>,
}

impl MountPlacement {
    /// The mount point, free of symbolic links.
    pub(super) fn target(&self) -> PathBuf {
        self.missing
            .iter()
            .fold(self.existing.clone(), |path, name| path.join(name))
    }
}

/// What is in the way of a volume, and where: a stand-in that hid it would keep the job from
/// writing to the directory above, and nobody asked for that.
pub(super) fn find_obstacle(
    host: &impl HostTree,
    place: &MountPlacement,
) -> Option<(PathBuf, MountObstacle)> {
    let path = place.existing.join(place.missing.first()?);
    host.obstacle_at(&path).map(|obstacle| (path, obstacle))
}

/// The stand-ins: for each host directory the names that it must not show, because
/// something new takes their place. Parents come before their children.
pub(super) type ShadowedNames = BTreeMap<PathBuf, BTreeSet<OsString>>;

/// Finds the deepest host directory on the way to `path`.
///
/// When all of `path` exists and is of the volume's own kind, nothing is missing and the
/// volume simply covers it. A file, or a link to nowhere, in place of a needed directory
/// counts as missing: [`find_obstacle`] tells them apart.
pub(super) fn find_placement(host: &impl HostTree, path: &Path, kind: PathKind) -> MountPlacement {
    if let Some((existing, found)) = host.resolve(path)
        && found == kind
    {
        return MountPlacement {
            existing,
            missing: Vec::new(),
        };
    }
    let mut missing = Vec::new();
    let mut at = path;
    while let (Some(parent), Some(name)) = (at.parent(), at.file_name()) {
        missing.insert(0, name.to_owned());
        at = parent;
        if let Some((existing, PathKind::Directory)) = host.resolve(at) {
            return MountPlacement { existing, missing };
        }
    }
    MountPlacement {
        existing: PathBuf::from("/"),
        missing,
    }
}

/// Collects the host directories that need a stand-in; `/` always has one.
pub(super) fn collect_shadowed_names(places: &[MountPlacement]) -> ShadowedNames {
    let mut shadows = ShadowedNames::from([(PathBuf::from("/"), BTreeSet::new())]);
    for place in places {
        if let Some(first) = place.missing.first() {
            shadows
                .entry(place.existing.clone())
                .or_default()
                .insert(first.clone());
        }
    }
    shadows
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Host paths with their kind; a target makes it a symbolic link.
    struct FakeHostTree(
        &'static [(&'static str, PathKind)],
        &'static [(&'static str, &'static str)],
    );

    impl HostTree for FakeHostTree {
        fn resolve(&self, path: &Path) -> Option<(PathBuf, PathKind)> {
            let mut real = path.to_owned();
            for (link, target) in self.1 {
                if let Ok(rest) = path.strip_prefix(link) {
                    // Joining an empty rest would leave a trailing slash.
                    real = Path::new(target)
                        .components()
                        .chain(rest.components())
                        .collect();
                }
            }
            let found = self.0.iter().find(|(known, _)| Path::new(known) == real)?;
            Some((real, found.1))
        }

        fn obstacle_at(&self, path: &Path) -> Option<MountObstacle> {
            match (
                self.resolve(path),
                self.1.iter().any(|(link, _)| Path::new(link) == path),
            ) {
                (Some((_, PathKind::File)), _) => Some(MountObstacle::File),
                (None, true) => Some(MountObstacle::DanglingLink),
                _ => None,
            }
        }
    }

    const HOST: FakeHostTree = FakeHostTree(
        &[
            ("/", PathKind::Directory),
            ("/tmp", PathKind::Directory),
            ("/usr", PathKind::Directory),
            ("/usr/share", PathKind::Directory),
            ("/usr/lib", PathKind::Directory),
            ("/etc", PathKind::Directory),
            ("/etc/passwd", PathKind::File),
        ],
        &[("/lib", "/usr/lib"), ("/nowhere", "/gone")],
    );

    #[track_caller]
    fn check(path: &str, existing: &str, missing: &[&str]) {
        let expected = MountPlacement {
            existing: existing.into(),
            missing: missing.iter().map(OsString::from).collect(),
        };
        assert_eq!(
            find_placement(&HOST, Path::new(path), PathKind::Directory),
            expected
        );
    }

    #[test]
    fn mount_paths_split_at_existing_directories() {
        check("/mydata", "/", &["mydata"]);
        check("/data/in", "/", &["data", "in"]);
        check("/tmp", "/tmp", &[]);
        check("/usr/share/xyz/db", "/usr/share", &["xyz", "db"]);
        check("/lib", "/usr/lib", &[]);
        check("/lib/xyz", "/usr/lib", &["xyz"]);
        check("/nowhere/in", "/", &["nowhere", "in"]);
        check("/etc/passwd", "/etc", &["passwd"]);
        check("/etc/passwd/in", "/etc", &["passwd", "in"]);
    }

    #[test]
    fn files_and_dangling_links_are_obstacles() {
        let found = |path: &str| {
            let place = find_placement(&HOST, Path::new(path), PathKind::Directory);
            let (at, obstacle) = find_obstacle(&HOST, &place)?;
            Some((at.display().to_string(), obstacle))
        };
        let file = Some(("/etc/passwd".to_owned(), MountObstacle::File));
        assert_eq!(found("/etc/passwd"), file);
        assert_eq!(found("/etc/passwd/in"), file);
        let link = Some(("/nowhere".to_owned(), MountObstacle::DanglingLink));
        assert_eq!(found("/nowhere"), link);
        assert_eq!(found("/nowhere/in"), link);
        for free in ["/tmp", "/lib", "/lib/xyz", "/data/in"] {
            assert_eq!(found(free), None, "{free}");
        }
    }

    #[test]
    fn shadows_are_merged_and_ordered_parents_first() {
        let paths = ["/usr/share/a", "/usr/b", "/data/in", "/data/out", "/tmp"];
        let places: Vec<_> = paths
            .iter()
            .map(|path| find_placement(&HOST, Path::new(path), PathKind::Directory))
            .collect();
        let drawn: Vec<_> = collect_shadowed_names(&places)
            .into_iter()
            .map(|(path, names)| format!("{} {names:?}", path.display()))
            .collect();
        assert_eq!(
            drawn,
            [r#"/ {"data"}"#, r#"/usr {"b"}"#, r#"/usr/share {"a"}"#]
        );
    }
}
