//! The snapshots, groups, and volumes created from them, in the model.

use std::collections::{BTreeMap, BTreeSet};

use slackwater::model::Level;
use slackwater::record::FormattedAs;
use tonic::Code;

use crate::simulation::VolumeConfig;
use crate::simulation::remote::{REMOTE_SIZE, REMOTE_TOKENS};
use crate::state_machine::model::{Model, Observation, Volume, VolumeView};

/// The source of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Snapshot(&'static str),
    Volume(&'static str),
    /// The snapshot of another machine.
    Remote,
}

/// The visible state of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotView {
    pub source: &'static str,
    pub size: u64,
    /// The file system with which the volume was completely formatted.
    pub formatted: Option<FormattedAs>,
    /// The file system of a mkfs that was cut off.
    pub begun: Option<FormattedAs>,
    /// The level of its class. For a member, it is that of its group.
    pub min_level: Option<Level>,
}

/// A snapshot.
#[derive(Clone, Debug)]
pub struct Cut {
    pub view: SnapshotView,
    tokens: BTreeSet<u64>,
}

/// A group: the requested volumes, and the members that exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    pub sources: BTreeSet<&'static str>,
    pub members: BTreeMap<&'static str, SnapshotView>,
}

impl Group {
    pub fn is_whole(&self) -> bool {
        self.members.len() == self.sources.len()
    }
}

fn cut_of(name: &'static str, volume: &Volume, min_level: Option<Level>) -> Cut {
    Cut {
        view: SnapshotView {
            source: name,
            size: volume.view.size,
            formatted: volume.view.formatted,
            begun: volume.view.begun,
            min_level,
        },
        tokens: volume.tokens.clone(),
    }
}

/// The snapshot of the other machine.
fn remote() -> Cut {
    Cut {
        view: SnapshotView {
            source: "remote",
            size: REMOTE_SIZE,
            formatted: Some(FormattedAs::Ext4),
            begun: None,
            min_level: None,
        },
        tokens: REMOTE_TOKENS.into(),
    }
}

/// The formatted and the begun state of content on a new volume. Content with a file system can be
/// used as a block device; raw bytes can be used only as a block device.
fn fitting(
    view: &SnapshotView,
    config: VolumeConfig,
) -> Result<(Option<FormattedAs>, Option<FormattedAs>), Code> {
    let Some(kind) = view.formatted.or(view.begun) else {
        return Ok((None, None));
    };
    match config.fs {
        None if kind == FormattedAs::Raw => Ok((view.formatted, view.begun)),
        None => Ok((Some(FormattedAs::Raw), None)),
        Some(fs) if FormattedAs::from(fs) == kind => Ok((view.formatted, view.begun)),
        Some(_) => Err(Code::InvalidArgument),
    }
}

impl Model {
    pub(crate) fn snapshot(
        &mut self,
        name: &'static str,
        volume: &'static str,
        level: Level,
    ) -> Result<(), Code> {
        match self.snapshots.get(name).map(|cut| &cut.view) {
            Some(view) if view.source == volume && view.min_level >= Some(level) => return Ok(()),
            Some(_) => return Err(Code::AlreadyExists),
            None => {}
        }
        let found = self.volumes.get(volume).ok_or(Code::NotFound)?;
        let cut = cut_of(volume, found, Some(level));
        self.snapshots.insert(name, cut);
        self.ghost_snapshots.remove(name);
        Ok(())
    }

    pub(crate) fn group(
        &mut self,
        name: &'static str,
        sources: &[&'static str],
    ) -> Result<(), Code> {
        let asked: BTreeSet<_> = sources.iter().copied().collect();
        match self.groups.get(name) {
            Some(group) if group.sources != asked => return Err(Code::AlreadyExists),
            Some(group) if group.is_whole() => return Ok(()),
            Some(_) => return Err(Code::FailedPrecondition),
            None => {}
        }
        let mut members = BTreeMap::new();
        for source in &asked {
            let volume = self.volumes.get(source).ok_or(Code::NotFound)?;
            members.insert(*source, cut_of(source, volume, None).view);
        }
        let sources = asked;
        self.groups.insert(name, Group { sources, members });
        self.ghost_groups.remove(name);
        Ok(())
    }

    /// Creates a volume from a source.
    pub(crate) fn create_from(
        &mut self,
        name: &'static str,
        source: Source,
        config: VolumeConfig,
        size: u64,
    ) -> Result<(), Code> {
        if let Some(view) = self.volumes.get(name).map(|volume| &volume.view) {
            let same = view.config == config && view.source == Some(source) && view.size >= size;
            return if same {
                Ok(())
            } else {
                Err(Code::AlreadyExists)
            };
        }
        let from = match source {
            Source::Snapshot(snapshot) => self.snapshots.get(snapshot).cloned(),
            Source::Remote => Some(remote()),
            Source::Volume(volume) => {
                let found = self.volumes.get(volume);
                found.map(|found| cut_of(volume, found, None))
            }
        };
        let from = from.ok_or(Code::NotFound)?;
        if size < from.view.size {
            return Err(Code::OutOfRange);
        }
        let (formatted, begun) = fitting(&from.view, config)?;
        let view = VolumeView {
            source: Some(source),
            formatted,
            begun,
            ..VolumeView::new(config, size)
        };
        self.volumes
            .insert(name, Volume::new(view, from.tokens.clone()));
        self.ghosts.remove(name);
        Ok(())
    }

    /// Takes over the actual state of snapshots, as [`Model::adopt`] does.
    pub(crate) fn adopt_snapshots(
        &mut self,
        after: &Model,
        now: &Observation,
    ) -> Result<(), String> {
        let known = self.snapshots.keys().chain(after.snapshots.keys());
        let names: BTreeSet<_> = known.chain(now.snapshots.keys()).copied().collect();
        for name in names {
            let before = self.snapshots.remove(name);
            let then = after.snapshots.get(name).cloned();
            let Some(view) = now.snapshots.get(name) else {
                match (before, then) {
                    (Some(_), Some(_)) if !self.unanswered.remove(name) => {
                        return Err(format!("snapshot {name} is missing"));
                    }
                    (Some(_), Some(_)) => {}
                    (Some(ghost), None) => drop(self.ghost_snapshots.insert(name, ghost)),
                    (None, _) => {}
                }
                continue;
            };
            let ghost = self.ghost_snapshots.get(name).cloned();
            let mut known = before.into_iter().chain(then).chain(ghost);
            let Some(mut cut) = known.find(|cut| cut.view == *view) else {
                return Err(format!("snapshot {name} is {view:?}"));
            };
            // Of those with the same view, it may be any.
            for other in known.filter(|other| other.view == *view) {
                cut.tokens.retain(|token| other.tokens.contains(token));
            }
            self.snapshots.insert(name, cut);
        }
        Ok(())
    }

    /// The same for groups: a member may exist or not if its group was being deleted.
    pub(crate) fn adopt_groups(&mut self, after: &Model, now: &Observation) -> Result<(), String> {
        let known = self.groups.keys().chain(after.groups.keys());
        let names: BTreeSet<_> = known.chain(now.groups.keys()).copied().collect();
        for name in names {
            let before = self.groups.remove(name);
            let then = after.groups.get(name).cloned();
            let ghost = self.ghost_groups.get(name).cloned();
            let found = now.groups.get(name).cloned().unwrap_or_default();
            let both = [&before, &then].map(|group| group.clone().unwrap_or_default());
            for source in both[0].members.keys().chain(both[1].members.keys()) {
                let stays = both.iter().all(|group| group.members.contains_key(source));
                let may_be_lost = self.unanswered.contains(name);
                if stays && !found.members.contains_key(source) && !may_be_lost {
                    return Err(format!("group {name} lacks the member of {source}"));
                }
            }
            let whole = [&before, &then, &ghost];
            let may_be = |source: &&'static str, view: &SnapshotView| {
                let mut known = whole.iter().filter_map(|group| group.as_ref());
                known.any(|group| {
                    group.sources == found.sources && group.members.get(source) == Some(view)
                })
            };
            if !found
                .members
                .iter()
                .all(|(source, view)| may_be(source, view))
            {
                return Err(format!("group {name} is {found:?}, of {whole:?}"));
            }
            if then.is_none()
                && let Some(gone) = before
            {
                let ghost = self.ghost_groups.entry(name).or_insert(gone.clone());
                ghost.members.extend(gone.members);
            }
            if !found.members.is_empty() {
                self.groups.insert(name, found);
            }
        }
        Ok(())
    }
}
