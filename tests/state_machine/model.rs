//! What the driver should do, in its simplest form: a map of volumes, and for each call the
//! answer and the change.

use std::collections::{BTreeMap, BTreeSet};

use slackwater::model::{FsType, Wipe};
use slackwater::record::FormattedAs;
use tonic::Code;

use crate::cuts::{Cut, CutFace, Group, Source};
use crate::world::{How, SIZE, Step};

/// What can be seen of a volume from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Face {
    /// As it was created.
    pub how: How,
    pub source: Option<Source>,
    pub size: u64,
    pub wipe: Wipe,
    /// What it was completely formatted as.
    pub formatted: Option<FormattedAs>,
    /// What a mkfs was begun as, and cut off.
    pub begun: Option<FormattedAs>,
    pub staged: bool,
    /// Staged, with a file system that has the whole size.
    pub grown: bool,
    /// Targets, with whether they are read-only.
    pub published: BTreeMap<u8, bool>,
}

impl Face {
    /// Of a new one.
    pub fn new(how: How, size: u64) -> Face {
        Face {
            how,
            source: None,
            size,
            wipe: how.wipe,
            formatted: None,
            begun: None,
            staged: false,
            grown: false,
            published: BTreeMap::new(),
        }
    }

    /// Whether its record says the same.
    fn is_recorded_as(&self, other: &Face) -> bool {
        let recorded = |face: &Face| (face.size, face.wipe, face.formatted, face.begun);
        recorded(self) == recorded(other)
    }
}

/// A volume.
#[derive(Clone, Debug)]
pub struct Volume {
    pub face: Face,
    /// How it was staged last.
    capability: Option<How>,
    /// What it was before changes that no call has answered: a power loss may bring it back.
    unanswered: Vec<Face>,
    pub tokens: BTreeSet<u64>,
}

impl Volume {
    /// One that was never staged.
    pub fn new(face: Face, tokens: BTreeSet<u64>) -> Volume {
        Volume {
            face,
            capability: None,
            unanswered: Vec::new(),
            tokens,
        }
    }
}

/// Everything there is.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub volumes: BTreeMap<&'static str, Volume>,
    pub inline: BTreeMap<&'static str, Inline>,
    /// Volumes whose deletion was begun and never answered: a power loss may bring them back.
    pub ghosts: BTreeMap<&'static str, Volume>,
    pub snapshots: BTreeMap<&'static str, Cut>,
    pub ghost_snapshots: BTreeMap<&'static str, Cut>,
    pub groups: BTreeMap<&'static str, Group>,
    pub ghost_groups: BTreeMap<&'static str, Group>,
    /// The file systems that the devices of raw volumes show, as the machine has them: what a user
    /// of a raw device leaves there is no business of the driver.
    pub shown: BTreeMap<&'static str, FsType>,
}

/// An inline volume.
#[derive(Clone, Debug, Default)]
pub struct Inline {
    pub mounted: bool,
    pub tokens: BTreeSet<u64>,
}

/// What can be seen of everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub volumes: BTreeMap<&'static str, Face>,
    /// Inline volumes, with whether they are mounted.
    pub inline: BTreeMap<&'static str, bool>,
    pub snapshots: BTreeMap<&'static str, CutFace>,
    /// Groups, of which some members may be gone.
    pub groups: BTreeMap<&'static str, Group>,
}

impl Seen {
    /// Whether this is what was expected. A file system may be larger than it should be: a growth
    /// that was cut off leaves a longer image, which is all taken.
    pub fn fits(&self, expected: &Seen) -> bool {
        let mut seen = self.clone();
        for (name, face) in &mut seen.volumes {
            let less = expected.volumes.get(name).is_some_and(|face| !face.grown);
            face.grown &= !less;
        }
        seen == *expected
    }

    /// Whether they are the same but for the marks that a volume was formatted: mkfs can't be
    /// undone, and needn't be.
    pub fn same_but_formatted(&self, other: &Seen) -> bool {
        let unmarked = |seen: &Seen| {
            let mut seen = seen.clone();
            let faces = seen.volumes.values_mut();
            faces.for_each(|face| (face.formatted, face.begun, face.grown) = (None, None, false));
            seen
        };
        unmarked(self) == unmarked(other)
    }
}

fn formatted_as(how: How) -> FormattedAs {
    how.fs.map_or(FormattedAs::Raw, FormattedAs::from)
}

impl Model {
    pub fn seen(&self) -> Seen {
        let face = |(name, volume): (&&'static str, &Volume)| (*name, volume.face.clone());
        Seen {
            volumes: self.volumes.iter().map(face).collect(),
            inline: self.mounted(),
            snapshots: self
                .snapshots
                .iter()
                .map(|(name, cut)| (*name, cut.face.clone()))
                .collect(),
            groups: self.groups.clone(),
        }
    }

    fn mounted(&self) -> BTreeMap<&'static str, bool> {
        let mounted = |(name, inline): (&&'static str, &Inline)| (*name, inline.mounted);
        self.inline.iter().map(mounted).collect()
    }

    /// Does a step, or says with which code it is refused.
    pub fn step(&mut self, step: &Step) -> Result<(), Code> {
        match step {
            Step::Create(name, how) => self.create(name, *how),
            Step::Delete(name) => match self.volumes.get(name) {
                Some(volume) if volume.face.staged || !volume.face.published.is_empty() => {
                    Err(Code::FailedPrecondition)
                }
                Some(_) | None => {
                    self.volumes.remove(name);
                    self.ghosts.remove(name);
                    Ok(())
                }
            },
            Step::Modify(name, wipe) => {
                self.volume(name)?.face.wipe = *wipe;
                Ok(())
            }
            Step::Expand(name, size) => {
                let face = &mut self.volume(name)?.face;
                face.grown &= *size <= face.size;
                face.size = face.size.max(*size);
                Ok(())
            }
            Step::ExpandNode(name) => {
                let face = &mut self.volume(name)?.face;
                if !face.staged {
                    return Err(Code::NotFound);
                }
                face.grown = face.formatted != Some(FormattedAs::Raw);
                Ok(())
            }
            Step::StageAs(name, how) => self.stage(name, *how),
            Step::Unstage(name) => {
                if let Some(volume) = self.volumes.get_mut(name) {
                    volume.face.staged = false;
                    volume.face.grown = false;
                }
                Ok(())
            }
            Step::PublishAs(name, n, read_only, how) => self.publish(name, *n, *read_only, *how),
            Step::Unpublish(name, n) => {
                if let Some(volume) = self.volumes.get_mut(name) {
                    volume.face.published.remove(n);
                }
                Ok(())
            }
            Step::PublishInline(name, how) => match how.fs {
                None => Err(Code::InvalidArgument),
                Some(_) => {
                    self.inline.entry(name).or_default().mounted = true;
                    Ok(())
                }
            },
            Step::UnpublishInline(name) => {
                self.inline.remove(name);
                Ok(())
            }
            Step::Snapshot(name, volume, level) => self.snapshot(name, volume, *level),
            Step::DeleteSnapshot(name) => {
                self.snapshots.remove(name);
                self.ghost_snapshots.remove(name);
                Ok(())
            }
            Step::Restore(name, snapshot, how, size) => {
                self.create_from(name, Source::Snapshot(snapshot), *how, *size)
            }
            Step::Clone(name, volume, how, size) => {
                self.create_from(name, Source::Volume(volume), *how, *size)
            }
            Step::Group(name, sources) => self.group(name, sources),
            Step::DeleteGroup(name) => {
                self.groups.remove(name);
                self.ghost_groups.remove(name);
                Ok(())
            }
            other => panic!("the model knows nothing of {other:?}"),
        }
    }

    /// A call of a volume was answered: what its record says is durable.
    pub fn answered(&mut self, step: &Step) {
        if let Step::Modify(name, _)
        | Step::Expand(name, _)
        | Step::StageAs(name, _)
        | Step::PublishAs(name, ..) = step
            && let Some(volume) = self.volumes.get_mut(name)
        {
            volume.unanswered.clear();
        }
    }

    fn volume(&mut self, name: &str) -> Result<&mut Volume, Code> {
        self.volumes.get_mut(name).ok_or(Code::NotFound)
    }

    fn create(&mut self, name: &'static str, how: How) -> Result<(), Code> {
        match self.volumes.get(name) {
            Some(Volume { face, .. }) if face.how == how && face.source.is_none() => Ok(()),
            Some(_) => Err(Code::AlreadyExists),
            None => {
                let volume = Volume::new(Face::new(how, SIZE), BTreeSet::new());
                self.volumes.insert(name, volume);
                self.ghosts.remove(name);
                Ok(())
            }
        }
    }

    fn stage(&mut self, name: &str, how: How) -> Result<(), Code> {
        let shown = self.shown.get(name).copied();
        let volume = self.volume(name)?;
        let face = &mut volume.face;
        let is_block = |formatted| formatted == FormattedAs::Raw;
        // A raw volume that nobody uses may be mounted as the file system that is on it.
        let is_found = face.formatted == Some(FormattedAs::Raw)
            && how.fs.is_some()
            && how.fs == shown
            && !face.staged
            && face.published.is_empty();
        if is_found {
            face.formatted = how.fs.map(FormattedAs::from);
        }
        if face
            .formatted
            .is_some_and(|formatted| is_block(formatted) != how.fs.is_none())
        {
            return Err(Code::FailedPrecondition);
        }
        if face.staged {
            let same = volume.capability.is_some_and(|before| before.fs == how.fs);
            return if same {
                Ok(())
            } else {
                Err(Code::AlreadyExists)
            };
        }
        if face
            .formatted
            .is_some_and(|formatted| formatted != formatted_as(how))
        {
            return Err(Code::FailedPrecondition);
        }
        (face.formatted, face.begun) = (Some(formatted_as(how)), None);
        face.staged = true;
        face.grown = how.fs.is_some();
        volume.capability = Some(how);
        Ok(())
    }

    fn publish(&mut self, name: &str, n: u8, read_only: bool, how: How) -> Result<(), Code> {
        let face = &mut self.volume(name)?.face;
        let as_staged = face.formatted == Some(FormattedAs::Raw);
        if !face.staged || as_staged != how.fs.is_none() {
            return Err(Code::FailedPrecondition);
        }
        match face.published.get(&n) {
            Some(before) if *before == read_only => return Ok(()),
            Some(_) => return Err(Code::AlreadyExists),
            None => {}
        }
        // One device for all targets of a block volume, so they are all read-only or none is.
        if how.fs.is_none() && face.published.values().any(|before| *before != read_only) {
            return Err(Code::FailedPrecondition);
        }
        face.published.insert(n, read_only);
        Ok(())
    }

    /// Mounts and inline volumes end with a boot; of those that can't be seen then only the mount.
    pub fn reboot(&mut self, is_hidden: impl Fn(&'static str) -> bool) {
        self.inline.retain(|name, _| is_hidden(name));
        self.inline
            .values_mut()
            .for_each(|inline| inline.mounted = false);
        for volume in self.volumes.values_mut() {
            volume.face.staged = false;
            volume.face.grown = false;
            volume.face.published.clear();
        }
    }

    /// Says whether the file system of a volume has the whole size.
    pub fn set_grown(&mut self, name: &str, grown: bool) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.face.grown = grown;
        }
    }

    /// Takes over what a call has really left, which was cut off on the way from `self` to
    /// `after`: each part of it must be as before or as after.
    pub fn adopt(&mut self, after: &Model, now: &Seen) -> Result<(), String> {
        let known = self.volumes.keys().chain(after.volumes.keys());
        let names: BTreeSet<&'static str> = known.chain(now.volumes.keys()).copied().collect();
        for name in names {
            let then = after.volumes.get(name);
            match now.volumes.get(name) {
                Some(face) => self.adopt_volume(name, then, face)?,
                None => match (self.volumes.remove(name), then) {
                    (Some(_), Some(_)) => return Err(format!("{name} is gone")),
                    (Some(ghost), None) => drop(self.ghosts.insert(name, ghost)),
                    (None, _) => {}
                },
            }
        }
        self.adopt_snapshots(after, now)?;
        self.adopt_groups(after, now)?;
        let (before, then) = (self.mounted(), after.mounted());
        for name in before.keys().chain(then.keys()).chain(now.inline.keys()) {
            let is = now.inline.get(name);
            // One that was only to be ended or made may be there without its mount.
            let half = is == Some(&false) && before.get(name) != then.get(name);
            // One of an earlier boot is ended by the next start that can see it.
            let ended = is.is_none() && before.get(name) == Some(&false);
            if is != before.get(name) && is != then.get(name) && !half && !ended {
                return Err(format!("inline {name}: {is:?}"));
            }
            match is {
                Some(mounted) => self.inline.entry(name).or_default().mounted = *mounted,
                None => drop(self.inline.remove(name)),
            }
        }
        Ok(())
    }

    fn adopt_volume(
        &mut self,
        name: &'static str,
        then: Option<&Volume>,
        face: &Face,
    ) -> Result<(), String> {
        let before = self.volumes.get(name).or(self.ghosts.get(name));
        let known: Vec<&Volume> = before.into_iter().chain(then).collect();
        let mut faces: Vec<&Face> = known.iter().map(|volume| &volume.face).collect();
        faces.extend(before.iter().flat_map(|volume| &volume.unanswered));
        if !is_between(&faces, face) {
            return Err(format!("{name} is {face:?}, between {faces:?}"));
        }
        let capability = match (before, then) {
            (_, Some(then)) if face.staged => then.capability,
            (Some(before), _) => before.capability,
            (None, then) => then.and_then(|then| then.capability),
        };
        // Of those that were made in the same way it may be any.
        let same =
            |volume: &&&Volume| volume.face.how == face.how && volume.face.source == face.source;
        let tokens = known
            .iter()
            .filter(same)
            .map(|volume| volume.tokens.clone());
        let tokens = tokens.reduce(|one, other| &one & &other);
        let mut unanswered = before.map_or(Vec::new(), |before| before.unanswered.clone());
        unanswered.extend(before.map(|before| before.face.clone()));
        unanswered.retain(|before| !before.is_recorded_as(face));
        let adopted = Volume {
            face: face.clone(),
            capability,
            unanswered,
            tokens: tokens.unwrap_or_default(),
        };
        self.volumes.insert(name, adopted);
        Ok(())
    }
}

/// Whether each part is one of those parts.
fn is_between(faces: &[&Face], now: &Face) -> bool {
    let any = |same: &dyn Fn(&Face) -> bool| faces.iter().any(|face| same(face));
    let targets = || faces.iter().flat_map(|face| face.published.keys());
    any(&|face| face.how == now.how && face.source == now.source)
        && any(&|face| face.size == now.size)
        && any(&|face| face.wipe == now.wipe)
        && any(&|face| face.formatted == now.formatted)
        && any(&|face| face.staged == now.staged)
        && any(&|face| now.grown || !face.grown)
        && targets()
            .chain(now.published.keys())
            .all(|n| any(&|face| face.published.get(n) == now.published.get(n)))
}
