//! What a device shows: nothing, a file system, or a user's raw bytes.

use uuid::Uuid;

use super::disk::BLOCK;
use crate::host::Signature;
use crate::model::FsType;

/// Bytes that an empty file system fills on the pool.
const METADATA: u64 = 16 * BLOCK;

/// The content of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) kind: ContentKind,
    /// Somebody has mounted it or written to it: to format it now would lose data.
    pub(super) used_before: bool,
    /// Its first megabytes read as zeros although there is more.
    pub(super) reads_blank: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ContentKind {
    /// Zeros.
    #[default]
    Blank,
    /// A file system.
    Fs(FsContent),
    /// A user's bytes.
    Raw(Vec<u64>),
    /// Something else that blkid knows by this name.
    Foreign(String),
}

/// A file system and the tokens that users have left in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FsContent {
    pub(super) fs: FsType,
    pub(super) uuid: Uuid,
    pub(super) bytes: u64,
    pub(super) tokens: Vec<u64>,
    pub(super) health: Health,
}

/// How a file system was left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Health {
    /// Unmounted, or with a journal that makes up for it.
    #[default]
    Sound,
    /// With errors that a check repairs by itself.
    Unclean,
    /// With errors that a person has to decide about.
    Broken,
}

impl FsContent {
    pub(super) fn used(&self) -> u64 {
        METADATA + self.tokens.len() as u64 * BLOCK
    }
}

impl Content {
    /// A fresh file system.
    pub(super) fn fresh(fs: FsType, uuid: Uuid, bytes: u64) -> Content {
        let kind = ContentKind::Fs(FsContent {
            fs,
            uuid,
            bytes,
            tokens: Vec::new(),
            health: Health::Sound,
        });
        Content {
            kind,
            ..Content::default()
        }
    }

    /// Bytes of blocks that it needs on the pool.
    pub(super) fn used(&self) -> u64 {
        match &self.kind {
            ContentKind::Blank => 0,
            ContentKind::Fs(fs) => fs.used(),
            ContentKind::Raw(tokens) => tokens.len() as u64 * BLOCK,
            ContentKind::Foreign(_) => BLOCK,
        }
    }

    /// What users have left.
    pub(super) fn tokens(&self) -> &[u64] {
        match &self.kind {
            ContentKind::Fs(fs) => &fs.tokens,
            ContentKind::Raw(tokens) => tokens,
            ContentKind::Blank | ContentKind::Foreign(_) => &[],
        }
    }

    pub(super) fn fs(&self) -> Option<&FsContent> {
        match &self.kind {
            ContentKind::Fs(fs) => Some(fs),
            ContentKind::Blank | ContentKind::Raw(_) | ContentKind::Foreign(_) => None,
        }
    }

    pub(super) fn fs_mut(&mut self) -> Option<&mut FsContent> {
        match &mut self.kind {
            ContentKind::Fs(fs) => Some(fs),
            ContentKind::Blank | ContentKind::Raw(_) | ContentKind::Foreign(_) => None,
        }
    }

    /// What blkid says.
    pub(super) fn signature(&self) -> Signature {
        match &self.kind {
            _ if self.reads_blank => Signature::None,
            ContentKind::Blank | ContentKind::Raw(_) => Signature::None,
            ContentKind::Foreign(name) => Signature::Other(name.clone()),
            ContentKind::Fs(content) => Signature::Fs {
                name: content.fs.name().into(),
                uuid: content.uuid.to_string(),
                size: Some(content.bytes),
                beside: None,
            },
        }
    }
}
