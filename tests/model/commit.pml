/* The commit protocol of a root on a local file system: writers, collector, reader, tagger, kills,
 * power cuts and one failing call.
 *
 * Built and run by tests/suites/model_check.py (`make model-check`); docs/explanation/guarantees.md
 * states what it proves. `code:` names the function that a transition follows; a test looks each of
 * them up. A transition is atomic where the code makes one system call that is atomic, where it
 * touches nothing that another process reads, or where a crash inside leaves only garbage.
 *
 * A save has a number, its bit in every set below. One leaf stands for all: a save writes one
 * segment and names its own and, unless it is written whole, those that it builds on.
 *
 * Defines: WRITERS, SAVES (of all writers), CRASHES and FAULTS are the size. Without LOCKS, flock
 * always succeeds and excludes nobody. BLIND: a commit's look at the lock's file tells nothing, so
 * that only the listing is left; then the writer that opened first must keep all, and the other opens after it.
 * A line marked `some copies` is not reachable wherever its inline is used.
 * PROCESS: durability="process". Every other define is a planted bug or a documented limit.
 */

#ifndef WRITERS
#define WRITERS 3
#endif
#ifndef SAVES
#define SAVES 3
#endif
#ifndef CRASHES
#define CRASHES 2
#endif
#ifndef FAULTS
#define FAULTS 0
#endif

#define NONE 15
#define HAS(set, i) ((set) & (1 << (i)))
#define ADD(set, i) set = set | (1 << (i))
#define DROP(set, i) set = set & ~(1 << (i))

/* Process numbers, for `running` and `dead`. */
#define COLLECTOR 3
#define TAGGER 4
#define READER 5

/* --- the file system ------------------------------------------------------------------------
 * v_ is what processes see, d_ what is on the disk for certain. A power cut decides about each
 * difference between the two for itself, in either direction. */

byte v_dir, d_dir;  /* segments/<id>: the name of the segment's directory */
byte v_data, d_data;  /* the content of its arrays */
byte v_table, d_table;  /* segments/<id>/zarr.json; d_: the names in this directory */
byte v_manifest, d_manifest;  /* checkpoints/c<seq>/zarr.json */
byte v_folder, d_folder;  /* checkpoints/c<seq>: the name of the manifest's directory */
byte garbage;  /* arrays whose name survived a power cut and whose content did not */
bit v_root, d_root;  /* the names that lead to the root */
bit v_tags, d_tags;  /* control/tags */
byte v_tag, d_tag;  /* the one tag: number of its save plus 1 */

byte names[SAVES];  /* the segments that the manifest of a save names */
byte seq[SAVES];  /* its sequence number */
byte owner[SAVES];  /* its writer */
byte fresh;  /* number of the next save */
byte writing;  /* segments whose arrays are being written */

/* --- locks; the kernel frees those of a process that ends ------------------------------------ */

byte holder;  /* of the flock on control/zarr.json: process plus 1 */
byte content;  /* of control/zarr.json: the process that took the lease last, plus 1 */
byte tags_holder;  /* of the flock on control/tags/zarr.json: process plus 1 */
byte pins;  /* segments whose table the reader has locked (shared) */
byte removing;  /* segments whose table a collector has locked (exclusive) */

/* --- processes ------------------------------------------------------------------------------- */

byte running, dead;
byte crashes = CRASHES, faults = FAULTS;
byte opened;  /* writers open in the order of their numbers: they are interchangeable */
byte late = NONE;  /* the save whose commit hangs in the creation of its manifest */
bit late_created;

/* --- what was promised ----------------------------------------------------------------------- */

byte acked;  /* saves whose wait() returned, until someone asks for their deletion */
byte tagged = NONE;  /* the save whose tag() returned */
byte unwanted;  /* saves that a retention rule deleted before they were acknowledged */
byte overtaken;  /* saves whose manifest was created after another writer took the root over */
byte base[SAVES];  /* the newest save when its writer opened the root, plus 1; only of its first */

byte i, j;  /* used within one transition, and 0 between two */

/* --- planted bugs: each replaces the definition below it ------------------------------------- */

#if defined(DIRECTORIES_NOT_SYNCED) || defined(PROCESS)
#define SYNCS_DIRECTORIES false
#else
#define SYNCS_DIRECTORIES true
#endif

#if defined(DATA_NOT_SYNCED) || defined(PROCESS)
#define SYNCS_DATA false
#else
#define SYNCS_DATA true
#endif

#if defined(LEASE_IGNORED) || !defined(LOCKS)
#define LEASE_IS_FREE true
#else
#define LEASE_IS_FREE (holder == 0)
#endif

#ifdef WITH_TAGGER
#define TAGS_ARE_FREE (tags_holder == 0)
#else
#define TAGS_ARE_FREE true
#endif

#ifdef COLLECTION_TAKES_SAVES_UNDER_WAY
#define IS_PAST(i, newest) true
#else
#define IS_PAST(i, newest) (seq[i] <= newest)
#endif

#ifdef COLLECTION_FORGETS_WHAT_IS_PROTECTED
#define PROTECTED(set) 0
#else
#define PROTECTED(set) (set)
#endif

#ifdef COLLECTION_TAKES_WHAT_A_READER_HAS_PINNED
#define IS_PINNED(i) false
#else
#define IS_PINNED(i) HAS(pins, i)
#endif

/* With locks nobody but the only writer changes what these steps look at. */
#if defined(LOCKS) || defined(BLIND)
#define UNLOCKED_STEP
#else
#define UNLOCKED_STEP }; atomic {
#endif

#ifdef WITH_READER
#define STEP_BESIDE_A_READER }; atomic {
#else
#define STEP_BESIDE_A_READER
#endif

#define IS_WHOLE(i) ((names[i] & ~(v_table & v_data)) == 0)
#define LISTED v_manifest

/* Where its look tells nothing, the writer that opened first is one that keeps all. */
#ifdef BLIND
#define MAY_RETAIN(me) (me != 0)
#else
#define MAY_RETAIN(me) true
#endif

/* A writer does not close while a thread of it hangs in a commit. */
#ifdef CLOSE_WITH_A_HANGING_COMMIT
#define MAY_CLOSE(me) true
#else
#define MAY_CLOSE(me) (late == NONE || owner[late] != me)
#endif

/* --- steps of the code, each used inside one transition -------------------------------------- */

/* code: deltacheck.store.files.durability.Durability.sync_directory
 * Of checkpoints/c<seq>: saves with the same number share it. */
inline sync_folder(s) {
	i = 0;
	do
	:: i < fresh ->
		if
		:: SYNCS_DIRECTORIES && seq[i] == seq[s] ->
			d_manifest = (d_manifest & ~(1 << i)) | (v_manifest & (1 << i))
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0
}

inline sync_checkpoints() {
	if
	:: SYNCS_DIRECTORIES -> d_folder = v_folder
	:: else
	fi
}

inline sync_segments() {
	if
	:: SYNCS_DIRECTORIES -> d_dir = v_dir
	:: else
	fi
}

/* code: deltacheck.store.segment.SegmentWriter.finish
 * The table, then the names of the whole segment. A crash in between leaves garbage. */
inline finish_segment(s) {
	ADD(v_table, s);
	/* code: deltacheck.store.files.durability.Durability.sync_tree */
	if
	:: SYNCS_DIRECTORIES -> d_table = d_table | (v_table & (1 << s))
	:: else
	fi;
	sync_segments()
}

/* Any element of a set; NONE if it is empty. */
inline choose(result, set) {
	result = 0;
	do
	:: HAS(set, result) -> break
	:: (set) >> (result + 1) -> result++
	:: (set) == 0 -> result = NONE; break  /* some copies */
	od
}

/* The newest listed save; NONE if there is none. */
inline find_newest(result) {
	result = NONE;
	i = 0;
	do
	:: i < fresh ->
		if
		:: HAS(LISTED, i) && (result == NONE || seq[i] > seq[result]) -> result = i
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0
}

/* code: deltacheck.store.collect._needed
 * The segments that any manifest names, but one that cannot be read. */
inline find_needed(result, unreadable) {
	result = 0;
	i = 0;
	do
	:: i < fresh ->
		if
		:: HAS(LISTED, i) && i != unreadable -> result = result | names[i]
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0
}

/* code: deltacheck.store.commit._fence
 * The result is whether the writer may commit. */
inline look(me, s, result) {
	result = 1;
#ifndef BLIND
	/* code: deltacheck.store.lock.lease.LocalLease.check */
	if
	:: content != me + 1 -> result = 0
	:: else
	fi;
#endif
#ifndef FENCE_IGNORED
	i = 0;
	do
	:: i < fresh ->
		if
		:: HAS(LISTED, i) && seq[i] > seq[s] -> result = 0
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0
#else
	skip
#endif
}

/* code: deltacheck.store.commit.commit
 * The exclusive creation of the manifest; the result is whether it is ours. */
inline create_manifest(s, result) {
	result = 1;
	i = 0;
	do
	:: i < fresh ->
		if
		:: HAS(LISTED, i) && seq[i] == seq[s] -> result = 0
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0;
	if
	:: result ->
		ADD(v_folder, s);
		ADD(v_manifest, s);
		if
		:: content != owner[s] + 1 -> ADD(overtaken, s)
		:: else
		fi
	:: else
	fi
}

/* code: deltacheck.store.commit._withdraw
 * Under the lock of the tags, and not if a tag names the step by now. */
inline withdraw(s) {
	if
#ifndef TAGGED_STEP_WITHDRAWN
	:: v_tag == s + 1  /* some copies */
#endif
	:: else -> DROP(v_manifest, s)  /* some copies */
	fi
}

/* code: deltacheck.save.progress.Progress.advance
 * wait() returns. */
inline acknowledge(s) {
	if
	:: !HAS(unwanted, s) -> ADD(acked, s)
	:: else
	fi;
#ifndef BLIND
	/* A writer that was overtaken before its commit point is refused. */
	assert(!HAS(overtaken, s));
	/* No two writers commit onto the same base. */
	j = 0;
	do
	:: j < fresh ->
		assert(j == s || base[s] == 0 || base[j] != base[s] || !HAS(acked, j)
			|| owner[j] == owner[s]);
		j++
	:: else -> break
	od;
	j = 0
#else
	skip
#endif
}

/* code: deltacheck.save.pipeline.Pipeline.fail
 * A save that failed before its commit removes its segment. */
inline remove_failed(s) {
	DROP(writing, s);
	DROP(v_table, s);
	DROP(v_data, s);
	DROP(v_dir, s);
#ifdef ERROR_SWALLOWED
	acknowledge(s)
#else
	skip
#endif
}

/* code: deltacheck.save.chains.chain_state.ChainState.begin
 * Deltas to the chain, or whole leaves. Its arrays are written from now on. */
inline begin(me, s) {
	s = fresh;
	fresh++;
	owner[s] = me;
	seq[s] = number;
	number++;
	ADD(v_dir, s);
	names[s] = 0;
	if
	:: chain -> names[s] = chain
	:: true
	fi;
	ADD(names[s], s);
	chain = names[s];
#ifdef LOCKS
	ADD(writing, s)
#else
	/* Of no manifest yet, so nobody can tell whether it is finished. */
	ADD(v_data, s);
	ADD(d_data, s);
	finish_segment(s);
	base[s] = (has_saved -> 0 : start);
	has_saved = 1
#endif
}

/* --- sequences of transitions ---------------------------------------------------------------- */

/* code: deltacheck.store.roots.tags.lock */
inline take_tags_lock(me) {
	if
	:: d_step { !v_tags -> v_tags = 1; }
		/* Another process that comes here meanwhile finds the directory and goes on. */
		d_step { d_tags = SYNCS_DIRECTORIES }
	:: v_tags
	fi;
	atomic { TAGS_ARE_FREE -> tags_holder = me + 1 }
}

/* code: deltacheck.store.collect.delete_checkpoint */
inline delete_checkpoint(s) {
	d_step {
#ifndef LOCKS
		if
		:: !HAS(acked, s) -> ADD(unwanted, s)
		:: else
		fi;
#endif
		DROP(acked, s);  /* on request, or by a retention rule */
#ifndef SEGMENTS_GONE_BEFORE_THEIR_STEP
		DROP(v_manifest, s)
#else
		skip
#endif
	};
	d_step {
#ifndef SEGMENTS_GONE_BEFORE_THEIR_STEP
#ifndef DELETION_NOT_SYNCED
		sync_folder(s);
#endif
		DROP(v_folder, s);
#ifndef DELETION_NOT_SYNCED
		sync_checkpoints();
#endif
#endif
		/* Whoever asked for the deletion is told that the step is gone. */
		assert(!HAS(LISTED, s))
	}
}

/* code: deltacheck.store.collect.collect
 * `protected`: segments that saves of this process need. `is_dead`: no save is under way. */
inline collect(protected, is_dead) {
	/* code: deltacheck.store.roots.store.Store.segment_ids
	 * The segments are listed before the manifests are read. */
	d_step { todo = v_dir };
	/* code: deltacheck.store.collect._needed */
	atomic {
		unread = NONE;
		if
		:: faults > 0 && LISTED ->  /* a manifest cannot be read */
			faults--;
			choose(unread, LISTED);
#ifndef COLLECTION_PASSES_OVER_WHAT_IT_CANNOT_READ
			todo = 0
#endif
		:: true
		fi;
		d_step {
			find_needed(needed, unread);
			find_newest(x);
			unread = 0;
			todo = todo & ~needed & ~PROTECTED(protected);
			needed = 0;
			j = 0;
			do
			:: j < fresh ->
				if
				:: !(is_dead) && (x == NONE || !IS_PAST(j, seq[x])) -> DROP(todo, j)
				:: else
				fi;
				j++
			:: else -> break
			od;
			j = 0;
			x = 0;
#ifndef DELETION_NOT_SYNCED
			/* code: deltacheck.store.collect._sync_deletions
			 * The process that deleted a step may have been killed before its sync. */
			if
			:: todo && SYNCS_DIRECTORIES ->
				d_manifest = d_manifest & v_manifest;
				d_folder = v_folder
			:: else
			fi
#endif
		}
	};
	/* code: deltacheck.store.collect._remove */
	do
	:: todo ->
		d_step {
			do
			:: !HAS(todo, x) -> x++
			:: else -> break
			od;
			DROP(todo, x)
		};
		/* code: deltacheck.store.lock.pins.unlink_unless_pinned */
		if
		:: atomic { !IS_PINNED(x) -> ADD(removing, x);
				STEP_BESIDE_A_READER
				DROP(v_table, x); DROP(removing, x) };
			d_step {
				DROP(v_data, x);
				DROP(v_dir, x);
				if
				:: SYNCS_DIRECTORIES -> DROP(d_table, x); DROP(d_data, x)
				:: else
				fi;
				sync_segments();
				x = 0
			}
		:: d_step { IS_PINNED(x) -> x = 0 }
		fi
	:: !todo -> break
	od
}

/* --- the processes --------------------------------------------------------------------------- */

#define me _pid  /* writers are the first processes of this file */

active [WRITERS] proctype Writer() provided (dead == 0 || HAS(dead, _pid)) {
	byte save = NONE;  /* the save that is being committed */
	byte next = NONE;  /* the one that is encoded behind it */
	byte chain;  /* the segments that the next save builds on */
	byte uncertain;  /* segments of a save whose manifest may still appear */
	byte number;  /* the next sequence number */
	byte start;  /* the newest save when this writer opened the root, plus 1 */
	byte todo, x, needed, unread;
	bit ours, has_saved;

	{
		/* code: deltacheck.store.lock.lease.LocalLease._take
		 * A writer that is refused and tries again is one that waits. */
		atomic {
			opened == me && LEASE_IS_FREE ->
#ifndef BLIND
			opened++;
#endif
			ADD(running, me);
			/* code: deltacheck.store.roots.opening.create_store */
			v_root = 1;
#ifdef LOCKS
			/* No two writers at a time. */
			assert(holder == 0);
#endif
			holder = me + 1;
			content = me + 1
		};
		atomic {
#ifndef WAY_TO_THE_ROOT_NOT_SYNCED
			/* code: deltacheck.store.files.durability.Durability.sync_ancestors
			 * In the code before the lease; here after it, so that waiting writers have one
			 * state. */
			d_root = SYNCS_DIRECTORIES;
#endif
			/* code: deltacheck.store.roots.root.Root.next_seq */
			i = 0;
			do
			:: i < fresh ->
				if
				:: HAS(v_dir | v_folder, i) && seq[i] + 1 > number -> number = seq[i] + 1
				:: else
				fi;
				i++
			:: else -> break
			od;
			i = 0;
#ifdef SEQUENCE_NUMBER_REUSED
			if
			:: number > 0 -> number--
			:: else
			fi;
#endif
			UNLOCKED_STEP
			/* code: deltacheck.backends.torch.group.restores.Restores.restore
			 * The newest step, if it is whole. */
			find_newest(x);
#ifndef LOCKS
			start = (x == NONE -> 0 : x + 1);
#endif
			UNLOCKED_STEP
			if
			:: x != NONE && IS_WHOLE(x) -> chain = names[x]
			:: else
			fi;
#ifdef BLIND
			opened++;
#endif
			x = 0
		};

		do
		:: atomic { save == NONE && next == NONE && fresh < SAVES -> begin(me, save) }
		:: save == NONE && next != NONE -> d_step { save = next; next = NONE }
		:: save == NONE && next == NONE && MAY_CLOSE(me) -> break
		:: save != NONE ->
#ifdef LOCKS
			/* code: deltacheck.store.segment.SegmentWriter.finish
			 * Wait for the arrays, then write the table. */
			if
#ifdef COMMIT_BEFORE_DATA
			:: d_step { true -> finish_segment(save) }
#else
			:: d_step { !HAS(writing, save) -> finish_segment(save) }
#endif
			:: d_step { HAS(writing, save) && faults > 0 -> faults--;  /* a full disk, or a deadline */
#ifdef TIMEOUT_IGNORED
				finish_segment(save)
#else
				/* A save that is encoded on top of the failed one fails, too. */
				remove_failed(save);
				if
				:: next != NONE -> remove_failed(next)
				:: else
				fi;
				save = NONE;
				next = NONE;
				chain = 0
#endif
				};
#ifndef TIMEOUT_IGNORED
				goto ended
#endif
			fi;
			if  /* the encoder begins the next save before this one is committed, or after */
			:: atomic { next == NONE && fresh < SAVES -> begin(me, next) }
			:: true
			fi;
#endif
			/* code: deltacheck.store.commit._fence */
			atomic {
				look(me, save, ours);
				if
				:: !ours -> goto refused
				:: else
				fi
			};
			atomic {
				if
				:: true
				:: faults > 0 && late == NONE ->
					/* code: deltacheck.save.chains.chain_state.ChainState.protect_uncertain
					 * The creation hangs, and the save is given up. */
					faults--;
					late = save;
					uncertain = names[save];
					if
					:: next != NONE -> remove_failed(next)
					:: else
					fi;
					save = NONE;
					next = NONE;
					chain = 0;
					ours = 0;
					goto ended
				fi;
				/* code: deltacheck.store.files.local_storage.LocalStorage.create_file */
				create_manifest(save, ours);
#ifdef LOCKS
				/* The only writer is never refused, and never finds its number taken. */
				assert(ours);
#endif
				if
				:: !ours -> goto refused
				:: else
				fi
			};
			/* code: deltacheck.store.commit._fence
			 * Again: another writer may have come between. */
#ifndef ONE_LOOK
			atomic {
				look(me, save, ours);
				if
				:: !ours -> withdraw(save); goto refused
				:: else
				fi
			};
#endif
			atomic {
				if
				:: true
				:: faults > 0 && TAGS_ARE_FREE ->  /* the sync fails */
					faults--;
					withdraw(save);
					if
					:: next != NONE -> remove_failed(next)
					:: else
					fi;
					save = NONE;
					next = NONE;
					chain = 0;
					ours = 0;
					goto ended
				fi;
#ifdef ACKNOWLEDGED_BEFORE_THE_SYNC
				acknowledge(save)
			};
			atomic {
#endif
				sync_folder(save);
				sync_checkpoints();
#ifndef ACKNOWLEDGED_BEFORE_THE_SYNC
				acknowledge(save);
#endif
				save = NONE;
				ours = 0
			};
			/* code: deltacheck.save.root_writer.RootWriter.retain
			 * keep_last=1, or a writer that keeps all. */
			if
			:: true -> goto ended
#ifdef WITH_TAGGER
			:: LISTED & (LISTED - 1)
			fi;
#ifndef PRUNE_WITHOUT_THE_LOCK_OF_TAGS
			take_tags_lock(me);
#endif
			atomic {
#else
			:: atomic { (LISTED & (LISTED - 1)) && MAY_RETAIN(me) ->
#endif
				/* code: deltacheck.save.root_writer.prune */
				find_newest(x);
				todo = LISTED & ~(1 << x);
				if
				:: v_tag -> DROP(todo, v_tag - 1)
				:: else
				fi;
				x = 0
			}
#ifndef WITH_TAGGER
			fi
#endif
			;
			do
			:: atomic { todo && content == me + 1 ->
					/* code: deltacheck.save.root_writer._delete_all
					 * The right to write is checked before each deletion. */
					do
					:: !HAS(todo, x) -> x++
					:: else -> break
					od;
					DROP(todo, x)
				};
				if  /* another writer may have deleted it */
				:: HAS(LISTED, x) -> delete_checkpoint(x)
				:: else
				fi;
				x = 0
			:: todo && content != me + 1 -> goto refused
			/* code: deltacheck.save.root_writer.RootWriter.retain
			 * And once more after the deletions. */
			:: atomic { !todo && content == me + 1 ->
					if
					:: tags_holder == me + 1 -> tags_holder = 0
					:: else
					fi
				};
				break
			:: !todo && content != me + 1 -> goto refused
			od;
			/* code: deltacheck.save.root_writer.RootWriter.collect */
			collect(chain | uncertain | (next == NONE -> 0 : names[next]), false);
ended:			skip
		od;
refused:	/* RootBusy: the writer gives up */
		atomic {
			/* code: deltacheck.save.root_writer.RootWriter.release */
			if
			:: holder == me + 1 -> holder = 0
			:: else
			fi;
			DROP(running, me)
		}
	} unless { HAS(dead, me) };
	d_step {
		save = 0; next = 0; chain = 0; uncertain = 0; number = 0; start = 0;
		todo = 0; x = 0; needed = 0; unread = 0; ours = 0; has_saved = 0;
		DROP(dead, me)
	}
}

/* The thread that was left behind in the creation of a manifest, and wakes at any time. */
active proctype Hanging() provided (dead == 0) {
	bit ours;
end:	do
	:: d_step { late != NONE && !late_created ->
			/* code: deltacheck.store.commit.commit */
			create_manifest(late, ours);
			if
			:: ours -> late_created = 1
			:: else -> late = NONE
			fi;
			ours = 0
		}
	:: d_step { late != NONE && late_created && TAGS_ARE_FREE ->
			look(owner[late], late, ours);
			if
			:: !ours || holder != owner[late] + 1 -> withdraw(late)
			:: else -> sync_folder(late); sync_checkpoints()
			fi;
			late = NONE;
			late_created = 0;
			ours = 0
		}
	od
}

/* TensorStore's and our own writing threads.
 * code: deltacheck.store.files.arrays.StreamWriter */
active proctype Disk() provided (dead == 0) {
end:	do
	:: atomic { writing ->
			choose(j, writing);
			DROP(writing, j);
#ifdef SYNCED_BEFORE_IT_IS_WRITTEN
			d_data = d_data | (v_data & (1 << j));
			ADD(v_data, j);
#else
			ADD(v_data, j);
			if
			:: SYNCS_DATA -> d_data = d_data | (v_data & (1 << j))
			:: else
			fi;
#endif
			j = 0
		}
	od
}

#ifdef WITH_COLLECTOR
/* code: deltacheck.cli.prune.prune
 * `deltacheck prune`, with or without a step to delete. */
active proctype Collector() provided (dead == 0 || HAS(dead, COLLECTOR)) {
	byte todo, x, needed, unread;
	/* code: deltacheck.cli.prune._open_for_writing */
end:	atomic {
		LEASE_IS_FREE && v_root ->
#ifdef LOCKS
		assert(holder == 0);
#endif
		holder = COLLECTOR + 1;
		content = COLLECTOR + 1;
		ADD(running, COLLECTOR)
	};
	{
#ifdef LOCKS
		/* code: deltacheck.save.root_writer.delete */
		if
		:: LISTED ->
#ifdef WITH_TAGGER
			take_tags_lock(COLLECTOR);
#endif
			/* A step that has a tag is refused. */
			atomic { choose(x, LISTED & ~(v_tag -> 1 << (v_tag - 1) : 0)) };
			if
			:: x != NONE -> delete_checkpoint(x)
			:: else
			fi;
			d_step { x = 0; tags_holder = 0 }
		:: true
		fi;
#endif
		collect(0, true);
		atomic {
			/* code: deltacheck.store.collect._remove_unfinished */
			v_folder = v_folder & v_manifest;
			if
			:: holder == COLLECTOR + 1 -> holder = 0
			:: else
			fi;
			DROP(running, COLLECTOR)
		}
	} unless { HAS(dead, COLLECTOR) };
	d_step { todo = 0; x = 0; needed = 0; unread = 0; DROP(dead, COLLECTOR) }
}
#endif

#ifdef WITH_TAGGER
/* code: deltacheck.store.roots.tagging.put */
active proctype Tagger() provided (dead == 0 || HAS(dead, TAGGER)) {
	byte x;
end:	atomic { LISTED -> ADD(running, TAGGER) };
	{
#ifndef TAG_WITHOUT_THE_LOCK
		take_tags_lock(TAGGER);
#else
		d_step { v_tags = 1; d_tags = 1 };
#endif
		/* code: deltacheck.store.roots.root.Root.afresh
		 * The step is read under the lock. */
		atomic { choose(x, LISTED) };
		if
		:: x != NONE ->
#ifndef TAG_BEFORE_ITS_STEP_IS_DURABLE
			/* The step may be of a commit that is not synced yet. */
			d_step { sync_folder(x); sync_checkpoints() };
#endif
			d_step { v_tag = x + 1 };
#ifndef TAG_NOT_SYNCED
			d_step {
				if
				:: SYNCS_DIRECTORIES ->
					d_tag = v_tag;
#ifndef WAY_TO_THE_TAGS_NOT_SYNCED
					d_tags = 1
#endif
				:: else
				fi
			};
#endif
		:: else -> x = NONE
		fi;
		atomic {
			tagged = x;
			if
			:: tags_holder == TAGGER + 1 -> tags_holder = 0
			:: else
			fi;
			DROP(running, TAGGER)
		}
	} unless { HAS(dead, TAGGER) };
	d_step { x = 0; DROP(dead, TAGGER) }
}
#endif

#ifdef WITH_READER
/* code: deltacheck.store.roots.root.open_segments */
active proctype Reader() provided (dead == 0 || HAS(dead, READER)) {
	byte step, x, rest;
	/* Any listed step.
	 * code: deltacheck.store.roots.root.Root.manifest */
end:	atomic { LISTED -> ADD(running, READER) };
	{
		atomic {
			choose(step, LISTED);
			if
			:: step == NONE -> goto failed  /* StepNotFound */
			:: else -> rest = names[step]
			fi
		};
		do
		:: d_step { rest ->
				/* code: deltacheck.store.roots.store.Store.segment
				 * The pin comes before the table is read. No pin, without an error, while the
				 * collector has the file locked. */
				do
				:: !HAS(rest, x) -> x++
				:: else -> break
				od;
				DROP(rest, x);
				if
				:: HAS(v_table & ~removing, x) -> ADD(pins, x)
				:: else
				fi
			};
			if
			/* ChainBroken, or StepNotFound if the step was deleted meanwhile. */
			:: !HAS(v_table, x) -> goto failed
			:: else -> x = 0
			fi
		:: d_step { !rest -> rest = names[step] }; break
		od;
		/* code: deltacheck.restore.read.read_chunks
		 * Nothing of a pinned segment is removed, so only what is not pinned may be missing. */
		atomic {
#ifndef PROCESS
			assert((rest & pins & ~(v_data | garbage)) == 0);
#endif
			x = ((rest & ~(v_data | garbage)) != 0);
#ifndef CONTENT_NOT_COMPARED_WITH_ITS_DIGEST
			/* code: deltacheck.restore.read._verify
			 * Every chunk is compared with its digest. */
			x = x || ((rest & garbage) != 0);
#endif
			/* Either an error, or what was saved. */
			assert(x || (rest & ~v_data) == 0)
		};
failed:		atomic { pins = 0; DROP(running, READER) }
	} unless { HAS(dead, READER) };
	d_step { step = 0; x = 0; rest = 0; DROP(dead, READER) }
}
#endif

/* --- crashes --------------------------------------------------------------------------------- */

/* Each difference between what was seen and what is on the disk is decided for itself. */
inline settle(v, d) {
	i = 0;
	do
	:: i < fresh ->
		if
		:: HAS(v ^ d, i) ->
			if
			:: ADD(v, i)
			:: DROP(v, i)
			fi
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0
}

/* No process is left that could read what no listed step names: such segments count as empty. */
inline forget_garbage() {
	i = 0;
	do
	:: i < fresh ->
		owner[i] = 0;
		if
		:: !HAS(LISTED, i) -> names[i] = 0; base[i] = 0
		:: else -> j = j | names[i]
		fi;
		if
		:: !HAS(v_dir | v_folder, i) -> seq[i] = 0
		:: else
		fi;
		i++
	:: else -> break
	od;
	v_table = v_table & j; d_table = v_table;
	v_data = v_data & j; d_data = v_data;
	garbage = garbage & j;
	i = 0;
	j = 0
}

inline free_locks(who) {
	if
	:: holder == who + 1 -> holder = 0
	:: else
	fi;
	if
	:: tags_holder == who + 1 -> tags_holder = 0
	:: else
	fi
}

active proctype Crash() {
end:	do
	:: atomic { crashes > 0 && running && dead == 0 -> crashes--;
			if
			:: true ->  /* a process is killed */
				choose(j, running);
				ADD(dead, j);
				DROP(running, j);
				free_locks(j);
				if
				:: late != NONE && owner[late] == j -> late = NONE; late_created = 0
				:: else
				fi;
				if
				:: j == READER -> pins = 0
				/* Writers and collectors lock segments for removal, one at a time. */
				:: j <= COLLECTOR -> removing = 0
				:: else
				fi;
				i = 0;
				do
				:: i < fresh ->
					if
					:: HAS(writing, i) && owner[i] == j -> DROP(writing, i)
					:: else
					fi;
					i++
				:: else -> break
				od;
				i = 0;
				j = 0
			:: true ->  /* the power fails */
				dead = dead | running;
				running = 0;
				holder = 0;
				tags_holder = 0;
				late = NONE;
				late_created = 0;
				writing = 0;
				removing = 0;
				pins = 0;
				settle(v_dir, d_dir);
				settle(v_table, d_table);
				/* Contents: whole, missing, or garbage under a name that survived. */
				i = 0;
				do
				:: i < fresh ->
					if
					:: HAS(v_data, i) && HAS(d_data, i) && HAS(d_table, i)
					:: HAS(v_data ^ d_data, i) || (HAS(v_data, i) && !HAS(d_table, i)) ->
						if
						:: ADD(v_data, i)
						:: DROP(v_data, i)
						:: !HAS(d_data, i) -> DROP(v_data, i); ADD(garbage, i)
						fi
					:: else
					fi;
					i++
				:: else -> break
				od;
				i = 0;
				settle(v_manifest, d_manifest);
				settle(v_folder, d_folder);
				if
				:: v_tags != d_tags -> 
					if
					:: v_tags = 1
					:: v_tags = 0
					fi
				:: else
				fi;
				if
				:: v_tag != d_tag ->
					if
					:: v_tag = d_tag
					:: true
					fi
				:: else
				fi;
				if
				:: !d_root -> v_root = 0; v_dir = 0; v_folder = 0; v_tags = 0
				:: true
				fi;
				d_step {
					v_table = v_table & v_dir;
					v_data = v_data & v_dir;
					garbage = garbage & v_dir;
					v_manifest = v_manifest & v_folder;
					v_tag = (v_tags -> v_tag : 0);
					d_dir = v_dir; d_table = v_table; d_data = v_data;
					d_manifest = v_manifest; d_folder = v_folder;
					d_tags = v_tags; d_tag = v_tag; d_root = v_root;
					forget_garbage();
#ifdef PROCESS
					acked = 0; tagged = NONE  /* promised for the death of the process only */
#endif
				}
			fi
		}
	od
}

/* --- properties ------------------------------------------------------------------------------ */

#define KEPT(s) (!HAS(acked, s) || (HAS(LISTED, s) && IS_WHOLE(s)))

/* An acknowledged step is restorable until it is deleted on request. */
#define ACKNOWLEDGED_ARE_KEPT (KEPT(0) && KEPT(1) && (SAVES < 3 || KEPT(2 % SAVES)) \
	&& (SAVES < 4 || KEPT(3 % SAVES)) && (SAVES < 5 || KEPT(4 % SAVES)) \
	&& (SAVES < 6 || KEPT(5 % SAVES)))

#define SOUND(s) (!HAS(LISTED, s) || IS_WHOLE(s))

/* Every listed step is whole, acknowledged or not: no manifest names a collected segment. */
#if defined(LOCKS) && !defined(PROCESS)
#define LISTED_ARE_WHOLE (SOUND(0) && SOUND(1) && (SAVES < 3 || SOUND(2 % SAVES)) \
	&& (SAVES < 4 || SOUND(3 % SAVES)) && (SAVES < 5 || SOUND(4 % SAVES)) \
	&& (SAVES < 6 || SOUND(5 % SAVES)))
#else
#define LISTED_ARE_WHOLE true
#endif

/* A tag that was acknowledged stays, and so does its step. */
#define TAGGED_IS_KEPT (tagged == NONE || (v_tag == tagged + 1 && HAS(LISTED, tagged) \
	&& IS_WHOLE(tagged)))

/* Enabled in a state that violates a property, and in no other: it adds no state. */
active proctype Properties() {
end:	do
	:: !ACKNOWLEDGED_ARE_KEPT -> assert(ACKNOWLEDGED_ARE_KEPT)
	:: !LISTED_ARE_WHOLE -> assert(LISTED_ARE_WHOLE)
	:: !TAGGED_IS_KEPT -> assert(TAGGED_IS_KEPT)
	od
}
