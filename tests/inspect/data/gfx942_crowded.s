crowded:                                ; @crowded
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_branch .LBB0_0
.LBB0_0:
	s_cbranch_scc1 .LBB0_2
	s_branch .LBB0_3
.LBB0_2:
.LBB0_3:
	s_cbranch_vccnz .LBB0_5
	s_branch .LBB0_6
.LBB0_5:
.LBB0_6:
	v_mov_b32_e32 v15, 0
	s_cbranch_vccnz .LBB0_8
	s_branch .LBB0_9
.LBB0_8:
.LBB0_9:
	s_cbranch_vccnz .LBB0_11
	s_branch .LBB0_12
.LBB0_11:
.LBB0_12:
	s_cbranch_vccnz .LBB0_21
	global_load_dwordx4 v[14:17], v[14:15], off
	s_cbranch_vccnz .LBB0_22
.LBB0_14:
	s_cbranch_vccnz .LBB0_23
.LBB0_15:
	s_cbranch_vccnz .LBB0_24
.LBB0_16:
	s_cbranch_vccnz .LBB0_25
.LBB0_17:
	s_and_b64 vcc, exec, s[0:1]
	s_cbranch_vccnz .LBB0_26
.LBB0_18:
	s_cbranch_vccnz .LBB0_27
.LBB0_19:
	s_cbranch_vccnz .LBB0_28
.LBB0_20:
	s_branch .LBB0_29
.LBB0_21:
	s_cbranch_vccz .LBB0_14
.LBB0_22:
	s_cbranch_vccz .LBB0_15
.LBB0_23:
	v_mov_b32_e32 v26, 0
	s_cbranch_vccz .LBB0_16
.LBB0_24:
	s_cbranch_vccz .LBB0_17
.LBB0_25:
	s_cbranch_vccz .LBB0_18
.LBB0_26:
	s_cbranch_vccz .LBB0_19
.LBB0_27:
	s_cbranch_vccz .LBB0_20
.LBB0_28:
.LBB0_29:
	s_waitcnt vmcnt(0)
	v_perm_b32 v3, v37, v29, s2
	s_cbranch_scc1 .LBB0_33
	scratch_load_dwordx4 v[42:45], off, off offset:416
	v_mov_b32_e32 v31, v15
	v_mov_b32_e32 v14, v15
	scratch_store_dwordx4 off, v[30:33], off offset:320
.LBB0_31:
	scratch_store_dwordx4 off, v[0:3], off offset:560
	scratch_store_dwordx4 off, v[0:3], off offset:544
	scratch_load_dwordx4 v[14:17], off, off offset:400
	scratch_store_dwordx4 off, v[10:13], off offset:384
	scratch_store_dwordx4 off, v[18:21], off offset:288
	scratch_store_dwordx4 off, v[10:13], off offset:512
	scratch_store_dwordx4 off, v[26:29], off offset:240
	scratch_load_dwordx4 v[18:21], off, off offset:160
	scratch_load_dwordx4 v[50:53], off, off offset:480
	scratch_load_dwordx4 v[22:25], off, off offset:112
	scratch_store_dwordx4 off, v[14:17], off offset:80
	scratch_load_dwordx4 v[16:19], off, off offset:16
	scratch_store_dwordx4 off, v[20:23], off offset:32
	scratch_load_dwordx4 v[22:25], off, off offset:368
	scratch_load_dwordx4 v[26:29], off, off offset:384
	scratch_store_dwordx4 off, v[54:57], off offset:496
	scratch_load_dwordx4 v[46:49], off, off offset:80
	scratch_store_dwordx4 off, v[42:45], off offset:64
	scratch_load_dwordx4 v[42:45], off, off
	v_mfma_f32_32x32x8_bf16 v[42:57], v[58:59], v[8:9], v[42:57]
	scratch_store_dwordx4 off, v[54:57], off offset:48
	scratch_load_dwordx4 v[54:57], off, off offset:176
	v_mfma_f32_32x32x8_bf16 v[42:57], v[2:3], v[6:7], v[42:57]
	scratch_store_dwordx4 off, v[42:45], off offset:128
	scratch_load_dwordx4 v[46:49], off, off offset:272
	v_mfma_f32_32x32x8_bf16 v[26:41], v[10:11], v[6:7], v[26:41]
	scratch_store_dwordx4 off, v[54:57], off offset:304
	scratch_load_dwordx4 v[42:45], off, off offset:192
	scratch_load_dword v4, off, off offset:532
	scratch_load_dwordx4 v[54:57], off, off offset:176
	scratch_store_dwordx4 off, v[46:49], off offset:144
	scratch_load_dwordx4 v[50:53], off, off offset:480
	scratch_load_dwordx4 v[10:13], off, off offset:64
	scratch_load_dwordx4 v[10:13], off, off
	scratch_store_dwordx4 off, v[14:17], off offset:16
	scratch_load_dwordx4 v[18:21], off, off offset:352
	scratch_store_dwordx4 off, v[30:33], off offset:400
	scratch_load_dwordx4 v[34:37], off, off offset:288
	scratch_load_dwordx4 v[18:21], off, off offset:96
	scratch_load_dwordx4 v[34:37], off, off offset:224
	scratch_load_dwordx4 v[18:21], off, off offset:32
	scratch_load_dwordx4 v[30:33], off, off offset:144
	scratch_load_dwordx4 v[10:13], off, off offset:320
	v_mfma_f32_32x32x8_bf16 v[10:25], v[2:3], v[8:9], v[10:25]
	scratch_store_dwordx4 off, v[10:13], off offset:320
	scratch_load_dword v8, off, off offset:636
	scratch_load_dword v56, off, off offset:620
	s_cbranch_scc1 .LBB0_31
	s_branch .LBB0_34
.LBB0_33:
	v_mov_b32_e32 v31, v55
	scratch_store_dwordx4 off, v[20:23], off offset:464
	v_mov_b32_e32 v35, v55
.LBB0_34:
	s_cbranch_scc1 .LBB0_36
	ds_read2st64_b64 v[8:11], v5 offset1:4
	v_mfma_f32_32x32x8_bf16 v[16:31], v[8:9], v[50:51], v[16:31]
	v_mfma_f32_32x32x8_bf16 v[0:15], v[18:19], v[48:49], v[0:15]
	v_mfma_f32_32x32x8_bf16 v[26:41], v[24:25], v[50:51], v[26:41]
	s_nop 0
	v_mfma_f32_32x32x8_bf16 v[48:63], v[0:1], v[6:7], v[48:63]
	scratch_load_dwordx4 v[20:23], off, off offset:80
	scratch_store_dwordx4 off, v[32:35], off
	scratch_store_dwordx4 off, v[36:39], off offset:336
	s_branch .LBB0_37
.LBB0_36:
.LBB0_37:
	scratch_load_dwordx4 v[52:55], off, off offset:272
	v_lshl_add_u64 v[4:5], v[2:3], 0, v[4:5]
	global_store_dwordx4 v[10:11], v[28:31], off
	s_waitcnt vmcnt(3)
	s_endpgm
.Lfunc_end0:
  - .agpr_count:     0
    .private_segment_fixed_size: 736
    .sgpr_count:     20
    .sgpr_spill_count: 0
    .vgpr_count:     64
    .vgpr_spill_count: 1097
; codeLenInByte = 10224
; Occupancy: 8
