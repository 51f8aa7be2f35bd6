//! The model's snapshots, groups, and volumes made of them.

use std::collections::{BTreeMap, BTreeSet};

use slackwater::model::Level;
use slackwater::record::FormattedAs;
use tonic::Code;

use crate::model::{Face, Model, Seen, Volume};
use crate::world::How;

/// What a volume was made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Snapshot(&'static str),
    Volume(&'static str),
}

/// What can be seen of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutFace {
    pub source: &'static str,
    pub size: u64,
    /// What the volume was completely formatted as.
    pub formatted: Option<FormattedAs>,
    /// What a mkfs was begun as, and cut off.
    pub begun: Option<FormattedAs>,
    /// The level of its class; a member's is its group's.
    pub promised: Option<Level>,
}

/// A snapshot.
#[derive(Clone, Debug)]
pub struct Cut {
    pub face: CutFace,
    tokens: BTreeSet<u64>,
}

/// A group: the volumes that it was asked for, and the members that are there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    pub sources: BTreeSet<&'static str>,
    pub members: BTreeMap<&'static str, CutFace>,
}

impl Group {
    pub fn is_whole(&self) -> bool {
        self.members.len() == self.sources.len()
    }
}

fn cut_of(name: &'static str, volume: &Volume, promised: Option<Level>) -> Cut {
    Cut {
        face: CutFace {
            source: name,
            size: volume.face.size,
            formatted: volume.face.formatted,
            begun: volume.face.begun,
            promised,
        },
        tokens: volume.tokens.clone(),
    }
}

/// What content counts as on a new volume: complete, or begun. A file system may be had as a
/// block device, raw bytes as nothing else.
fn fitting(face: &CutFace, how: How) -> Result<(Option<FormattedAs>, Option<FormattedAs>), Code> {
    let Some(kind) = face.formatted.or(face.begun) else {
        return Ok((None, None));
    };
    match how.fs {
        None if kind == FormattedAs::Raw => Ok((face.formatted, face.begun)),
        None => Ok((Some(FormattedAs::Raw), None)),
        Some(fs) if FormattedAs::from(fs) == kind => Ok((face.formatted, face.begun)),
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
        match self.snapshots.get(name).map(|cut| &cut.face) {
            Some(face) if face.source == volume && face.promised >= Some(level) => return Ok(()),
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
        let mut used = Vec::new();
        for source in &asked {
            let volume = self.volumes.get(source).ok_or(Code::NotFound)?;
            let face = &volume.face;
            let raw = face.formatted == Some(FormattedAs::Raw);
            if !face.published.is_empty() || (face.staged && !raw) {
                used.push(raw);
            }
            members.insert(*source, cut_of(source, volume, None).face);
        }
        if used.len() > 1 && used.contains(&true) {
            return Err(Code::FailedPrecondition);
        }
        let sources = asked;
        self.groups.insert(name, Group { sources, members });
        self.ghost_groups.remove(name);
        Ok(())
    }

    /// A volume from a source.
    pub(crate) fn create_from(
        &mut self,
        name: &'static str,
        source: Source,
        how: How,
        size: u64,
    ) -> Result<(), Code> {
        if let Some(face) = self.volumes.get(name).map(|volume| &volume.face) {
            let same = face.how == how && face.source == Some(source) && face.size >= size;
            return if same {
                Ok(())
            } else {
                Err(Code::AlreadyExists)
            };
        }
        let from = match source {
            Source::Snapshot(snapshot) => self.snapshots.get(snapshot).cloned(),
            Source::Volume(volume) => {
                let found = self.volumes.get(volume);
                found.map(|found| cut_of(volume, found, None))
            }
        };
        let from = from.ok_or(Code::NotFound)?;
        if size < from.face.size {
            return Err(Code::OutOfRange);
        }
        let (formatted, begun) = fitting(&from.face, how)?;
        let face = Face {
            source: Some(source),
            formatted,
            begun,
            ..Face::new(how, size)
        };
        self.volumes
            .insert(name, Volume::new(face, from.tokens.clone()));
        self.ghosts.remove(name);
        Ok(())
    }

    /// Takes over what is really there of snapshots, as [`Model::adopt`] does.
    pub(crate) fn adopt_snapshots(&mut self, after: &Model, now: &Seen) -> Result<(), String> {
        let known = self.snapshots.keys().chain(after.snapshots.keys());
        let names: BTreeSet<_> = known.chain(now.snapshots.keys()).copied().collect();
        for name in names {
            let before = self.snapshots.remove(name);
            let then = after.snapshots.get(name).cloned();
            let Some(face) = now.snapshots.get(name) else {
                match (before, then) {
                    (Some(_), Some(_)) => return Err(format!("snapshot {name} is gone")),
                    (Some(ghost), None) => drop(self.ghost_snapshots.insert(name, ghost)),
                    (None, _) => {}
                }
                continue;
            };
            let ghost = self.ghost_snapshots.get(name).cloned();
            let mut known = before.into_iter().chain(then).chain(ghost);
            let Some(mut cut) = known.find(|cut| cut.face == *face) else {
                return Err(format!("snapshot {name} is {face:?}"));
            };
            // Of those that look the same it may be any.
            for other in known.filter(|other| other.face == *face) {
                cut.tokens.retain(|token| other.tokens.contains(token));
            }
            self.snapshots.insert(name, cut);
        }
        Ok(())
    }

    /// The same of groups: a member may be there or not if its group was being deleted.
    pub(crate) fn adopt_groups(&mut self, after: &Model, now: &Seen) -> Result<(), String> {
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
                if stays && !found.members.contains_key(source) {
                    return Err(format!("group {name} has no {source} any more"));
                }
            }
            let whole = [&before, &then, &ghost];
            let may_be = |source: &&'static str, face: &CutFace| {
                let mut known = whole.iter().filter_map(|group| group.as_ref());
                known.any(|group| {
                    group.sources == found.sources && group.members.get(source) == Some(face)
                })
            };
            if !found
                .members
                .iter()
                .all(|(source, face)| may_be(source, face))
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
