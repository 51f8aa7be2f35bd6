//! What a device contains: nothing, a file system, or the raw bytes of a user.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::disk::BLOCK;
use crate::host::Signature;
use crate::model::FsType;

/// Bytes that an empty file system allocates on the pool.
const METADATA: u64 = 16 * BLOCK;

/// The content of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Content {
    pub(super) kind: ContentKind,
    /// It was mounted or written to: formatting it now would lose data.
    pub(super) used_before: bool,
    /// Its first megabytes read as zeros although it has content.
    pub(super) reads_blank: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ContentKind {
    /// Only zeros.
    #[default]
    Blank,
    /// A file system.
    Fs(FsContent),
    /// Bytes written by a user.
    Raw(Vec<u64>),
}

/// A file system and the tokens that users have written to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FsContent {
    pub(super) fs: FsType,
    pub(super) uuid: Uuid,
    pub(super) bytes: u64,
    pub(super) tokens: Vec<u64>,
    pub(super) health: Health,
}

/// The state in which a file system was left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Health {
    /// Unmounted cleanly, or with a journal to be replayed.
    #[default]
    Sound,
    /// With errors that a check repairs without a decision.
    Unclean,
    /// With errors that require the decision of a person.
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

    /// Bytes of blocks that it allocates on the pool.
    pub(super) fn used(&self) -> u64 {
        match &self.kind {
            ContentKind::Blank => 0,
            ContentKind::Fs(fs) => fs.used(),
            ContentKind::Raw(tokens) => tokens.len() as u64 * BLOCK,
        }
    }

    pub(super) fn fs(&self) -> Option<&FsContent> {
        match &self.kind {
            ContentKind::Fs(fs) => Some(fs),
            ContentKind::Blank | ContentKind::Raw(_) => None,
        }
    }

    pub(super) fn fs_mut(&mut self) -> Option<&mut FsContent> {
        match &mut self.kind {
            ContentKind::Fs(fs) => Some(fs),
            ContentKind::Blank | ContentKind::Raw(_) => None,
        }
    }

    /// What blkid reports.
    pub(super) fn signature(&self) -> Signature {
        match &self.kind {
            _ if self.reads_blank => Signature::None,
            ContentKind::Blank | ContentKind::Raw(_) => Signature::None,
            ContentKind::Fs(content) => Signature::Fs {
                name: content.fs.name().into(),
                uuid: content.uuid.to_string(),
                size: Some(content.bytes),
                beside: None,
            },
        }
    }
}
